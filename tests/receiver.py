"""A real HTTP server on loopback that receives webhooks, remembers them, and answers as a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext

import openai
from openai.types.webhooks import UnwrapWebhookEvent


@dataclass
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    def unwrap(self, secret: str) -> UnwrapWebhookEvent:
        """As the official client verifies and reads it."""
        with openai.OpenAI(api_key="x", base_url="http://127.0.0.1:1/v1", webhook_secret=secret) as client:
            return client.webhooks.unwrap(self.body, self.headers)


@dataclass
class Receiver:
    """`statuses` are the next answers; then 204. While `gate` isn't set nobody is answered."""

    url: str
    port: int
    received: list[Received] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    location: str = ""
    gate: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, count: int, timeout_s: float = 20.0) -> list[Received]:
        deadline = time.monotonic() + timeout_s
        while len(self.received) < count:
            assert time.monotonic() < deadline, f"{len(self.received)} webhooks came, not {count}"
            time.sleep(0.02)
        return self.received


@contextmanager
def receiving(tls: SSLContext | None = None) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            made.received.append(Received(self.path, headers, body))
            made.gate.wait(30)
            status = made.statuses.pop(0) if made.statuses else 204
            self.send_response(status)
            if made.location:
                self.send_header("Location", made.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    port = server.server_address[1]
    made = Receiver(f"{'https' if tls else 'http'}://127.0.0.1:{port}/hook?a=1", port)
    made.gate.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
