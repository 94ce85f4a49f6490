"""The small HTTP server of a worker process, beside its work: /livez, /readyz and /metrics, as the API has them.

    /livez     the process runs and hears; needs no key
    /readyz    whether it can do its work, part by part: 503 names the part that is in the way; needs no key
    /metrics   Prometheus' text; needs no key from this machine, and an admin key from any other

Standard library alone: three pages for a probe and a scraper want no framework in a process whose cores belong to an
engine. A client that is slow, in asking or in reading, holds a thread for `_PATIENCE_S` at most for each, and there are
`_MOST_CLIENTS` of these.
"""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from batchsvc.accounts.scrapers import is_loopback
from batchsvc.clock import monotonic_s
from batchsvc.errors import AuthenticationError, NotFoundError, ServiceError, UnavailableError
from batchsvc.health import Checks

_PATIENCE_S = 10.0
_MOST_CLIENTS = 16
_JSON = "application/json"
_NO_KEY = AuthenticationError(
    "From another machine, metrics need an admin key: send it in a header, Authorization: Bearer KEY.",
    code="invalid_api_key",
)
_NO_PAGE = NotFoundError("There are /livez, /readyz and /metrics here.", code="not_found")
_DEFECT = ServiceError("This page can't be made now: the log says why.", code="internal_error")

log = structlog.get_logger(__name__)


class Listener:
    """Answers from `start` to `close`. `may_read` judges the key of a caller from elsewhere."""

    def __init__(
        self, host: str, port: int, *, checks: Checks, metrics: Callable[[], bytes], may_read: Callable[[str], bool]
    ) -> None:
        """Raises UnavailableError, which names the setting, if it can't listen there."""
        self._host = host
        pages = _Pages(checks, metrics, may_read)
        try:
            self._server = _Server((host, port), pages)
        except OSError as error:
            raise UnavailableError(
                f"BATCHSVC_SIGNALS_HOST={host} and BATCHSVC_SIGNALS_PORT={port} can't be listened on "
                f"({error.strerror or error}): name another port, or 0 for any free one."
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="signals", daemon=True
        )

    @property
    def url(self) -> str:
        """Where it listens, without a path."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_port}"

    def start(self) -> None:
        self._thread.start()
        log.info("signals.listening", url=self.url)

    def close(self) -> None:
        """Answer nobody any more."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Pages:
    """What there is to see."""

    def __init__(self, checks: Checks, metrics: Callable[[], bytes], may_read: Callable[[str], bool]) -> None:
        self._checks, self._metrics, self._may_read = checks, metrics, may_read

    def answer(self, path: str, client: str, authorization: str) -> tuple[int, str, bytes]:
        """Status, media type and body."""
        if path == "/livez":
            return 200, _JSON, _json({"status": "ok"})
        if path == "/readyz":
            health = self._checks.look()
            return (200 if health.is_ready else 503), _JSON, _json(health.shown())
        if path == "/metrics":
            scheme, _, secret = authorization.partition(" ")
            if not is_loopback(client) and not (scheme.lower() == "bearer" and self._may_read(secret.strip())):
                return _NO_KEY.status, _JSON, _json(_NO_KEY.envelope())
            return 200, CONTENT_TYPE_LATEST, self._metrics()
        return _NO_PAGE.status, _JSON, _json(_NO_PAGE.envelope())


class _Server(ThreadingHTTPServer):
    """One thread a client, up to a limit; who comes beyond it is hung up on."""

    daemon_threads = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], pages: _Pages) -> None:
        self.pages = pages
        self._places = threading.BoundedSemaphore(_MOST_CLIENTS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing to tell."""


class _Asked(io.RawIOBase):
    """What a client sends, all of it within `_PATIENCE_S`: a socket's own timeout begins anew with each byte."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until_s = monotonic_s() + _PATIENCE_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - monotonic_s()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Asked(self.connection))

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        try:
            status, kind, body = self.server.pages.answer(
                path, str(self.client_address[0]), self.headers.get("Authorization", "")
            )
        except Exception as error:  # a defect of ours: the process goes on, and the caller is told no details
            log.warning("signals.failed", path=path, error=type(error).__name__)
            status, kind, body = _DEFECT.status, _JSON, _json(_DEFECT.envelope())
        self.connection.settimeout(_PATIENCE_S)  # for the whole of the answer
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  likewise

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: nobody wants a line for each."""

    def version_string(self) -> str:
        return "batchsvc"


def _json(said: Mapping[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"
