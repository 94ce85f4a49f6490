"""The probe says whether a URL answers 200, now or within a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from batchsvc.deploy.probe import main


class Answer(BaseHTTPRequestHandler):
    ready_at = 0.0

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/livez" or time.monotonic() >= Answer.ready_at else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_it_asks_once_or_until_the_time_is_over(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    Answer.ready_at = time.monotonic() + 0.7
    assert main([f"{url}/livez"]) == 0
    assert main([f"{url}/readyz"]) == 1
    assert "doesn't answer 200" in capsys.readouterr().err
    assert main([f"{url}/readyz", "30"]) == 0
    assert main(["http://127.0.0.1:9/readyz"]) == 1
    assert main(["no url"]) == 1
    assert main([]) == 2
