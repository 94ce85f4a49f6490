"""The pages of a worker process: what they say, to whom, and what a crowd, a stranger or a taken port gets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from batchsvc import listener as listening
from batchsvc.errors import UnavailableError
from batchsvc.health import Health
from batchsvc.listener import Listener


class Parts:
    """Stands for the checks: a process whose parts are as the test says."""

    def __init__(self, **parts: str) -> None:
        self.parts = {"database": "ok", "store": "ok", "redis": "ok", **parts}

    def look(self) -> Health:
        return Health(dict(self.parts))


@contextmanager
def open_on(
    parts: Parts, *, metrics: Callable[[], bytes] = lambda: b"batchsvc_ready 1.0\n", key: str = "k"
) -> Iterator[Listener]:
    made: Any = parts
    opened = Listener("127.0.0.1", 0, checks=made, metrics=metrics, may_read=lambda secret: secret == key)
    opened.start()
    try:
        yield opened
    finally:
        opened.close()


def get(listener: Listener, path: str, **headers: str) -> httpx.Response:
    return httpx.get(listener.url + path, headers=headers, trust_env=False, timeout=30)


def test_pages() -> None:
    with open_on(Parts()) as listener:
        assert get(listener, "/livez").json() == {"status": "ok"}
        ready = get(listener, "/readyz?verbose")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        metrics = get(listener, "/metrics")
        assert metrics.text == "batchsvc_ready 1.0\n" and metrics.headers["content-type"].startswith("text/plain")
        assert httpx.head(listener.url + "/livez", trust_env=False).content == b""
        assert get(listener, "/v1/files").status_code == 404
        assert "Python" not in get(listener, "/livez").headers["server"]


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ({"database": "The database can't be written (OperationalError)."}, "unready", 503),
        ({"store": "The object store doesn't answer."}, "unready", 503),
        ({"engine": "The worker drains and ends."}, "unready", 503),
        ({"redis": "Redis doesn't answer (ConnectionError); work goes on, and starts later."}, "degraded", 200),
    ],
)
def test_readiness_names_what_fails(parts: dict[str, str], status: str, code: int) -> None:
    with open_on(Parts(**parts)) as listener:
        ready = get(listener, "/readyz")
        assert (ready.status_code, ready.json()["status"]) == (code, status)
        assert {name: says for name, says in ready.json()["parts"].items() if says != "ok"} == parts
        assert get(listener, "/livez").status_code == 200, "it lives"
        if code == 503:
            assert ready.json()["error"]["message"] == next(iter(parts.values()))


def test_metrics_from_elsewhere_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "is_loopback", lambda _client: False)
    with open_on(Parts(), key="right") as listener:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
            refused = get(listener, "/metrics", **headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert get(listener, "/metrics", Authorization="Bearer right").status_code == 200
        assert get(listener, "/livez").status_code == get(listener, "/readyz").status_code == 200


@pytest.mark.parametrize(
    ("client", "is_here"), [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("192.0.2.7", False)]
)
def test_what_counts_as_this_machine(client: str, is_here: bool) -> None:
    assert listening.is_loopback(client) is is_here


def test_a_taken_port_is_one_sentence_that_names_the_setting() -> None:
    with open_on(Parts()) as listener:
        port = int(listener.url.rpartition(":")[2])
        with pytest.raises(UnavailableError, match=f"BATCHSVC_SIGNALS_PORT={port}"):
            Listener("127.0.0.1", port, checks=None, metrics=bytes, may_read=lambda _: False)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=r"BATCHSVC_SIGNALS_HOST=203\.0\.113\.9"):
        Listener("203.0.113.9", 0, checks=None, metrics=bytes, may_read=lambda _: False)  # type: ignore[arg-type]


def test_a_defect_tells_no_details() -> None:
    def broken() -> bytes:
        raise RuntimeError("postgresql://user:secret@host/")

    with open_on(Parts(), metrics=broken) as listener:
        answer = get(listener, "/metrics")
        assert answer.status_code == 500 and "secret" not in answer.text
        assert get(listener, "/livez").status_code == 200


def test_a_crowd_holds_a_limited_number_of_threads() -> None:
    with open_on(Parts()) as listener:
        port = int(listener.url.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(listening._MOST_CLIENTS)]
        deadline = time.monotonic() + 30
        while _num_handlers() < listening._MOST_CLIENTS:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(httpx.HTTPError):
            get(listener, "/livez")
        for client in silent:
            client.close()
        while _num_handlers():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert get(listener, "/livez").status_code == 200


def test_one_that_sends_a_byte_now_and_then_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_PATIENCE_S", 0.5)
    with open_on(Parts()) as listener:
        port = int(listener.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as slow:
            deadline, hung_up = time.monotonic() + 30, False
            while not hung_up:
                assert time.monotonic() < deadline, "each byte gave it more time"
                time.sleep(0.1)
                try:
                    slow.sendall(b"G")
                except OSError:
                    hung_up = True
        assert get(listener, "/livez").status_code == 200


def _num_handlers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())
