"""What surrounds every request: its id, the limit of its body, one log line, and the 500 of last resort.

Plain ASGI, so that bodies stream through untouched. The log line names method, path, status and time, never a query,
a header or a body. What a refused client still sends is read and thrown away by uvicorn.
"""

from __future__ import annotations

from collections.abc import Collection

import structlog
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchsvc import ids
from batchsvc.clock import monotonic_s
from batchsvc.errors import ServiceError
from batchsvc.http.errors import response
from batchsvc.logs import where

MAX_BODY_BYTES = 1_048_576  # every body but an upload

log = structlog.get_logger(__name__)


class RequestMiddleware:
    """Wraps the application. `streaming` names the (method, path) pairs that limit their bodies themselves."""

    def __init__(self, app: ASGIApp, streaming: Collection[tuple[str, str]]) -> None:
        self.app = app
        self.streaming = frozenset(streaming)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        limited = (scope["method"], scope["path"]) not in self.streaming
        with structlog.contextvars.bound_contextvars(request_id=exchange.id):
            try:
                await self.app(scope, exchange.receive if limited else receive, exchange.send)
            except ClientDisconnect:
                exchange.status = exchange.status or 499  # nobody is there to read a status: for the log only
            except Exception as error:
                log.critical("request.failed", **where(error))
                if exchange.status is None:
                    failure = ServiceError(
                        f"Something broke here; the request was {exchange.id}.", code="internal_error"
                    )
                    await response(failure)(scope, receive, exchange.send)
            finally:
                exchange.log()


class _Exchange:
    """One request and its response as they pass by."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.id = "req_" + ids.random_text(24)
        self.status: int | None = None
        self._scope, self._receive, self._send = scope, receive, send
        self._started_s = monotonic_s()
        self._body_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self._body_bytes += len(message.get("body", b""))
        if self._body_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"The request's body is over {MAX_BODY_BYTES} bytes.")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            headers["x-content-type-options"] = "nosniff"
            headers["cache-control"] = "no-store"
        await self._send(message)

    def log(self) -> None:
        took_ms = round((monotonic_s() - self._started_s) * 1000, 1)
        quiet = self._scope["path"] in ("/livez", "/readyz", "/metrics")
        (log.debug if quiet else log.info)(
            "request.served",
            request_id=self.id,
            method=self._scope["method"],
            path=self._scope["path"],
            status=self.status,
            ms=took_ms,
        )
