"""What surrounds every request: its id, the limit of its body, one log line, and the 500 of last resort.

Whatever answers a request, the response gets the headers that dependencies have put into its state as `headers`.

Plain ASGI, so that bodies stream through untouched. The log line names method, path, status and time, never a query,
a header or a body. What a refused client still sends is read and thrown away by uvicorn.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

import structlog
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from batchsvc import counters, ids
from batchsvc.clock import monotonic_s
from batchsvc.errors import ServiceError
from batchsvc.http.errors import response
from batchsvc.logs import where

MAX_BODY_BYTES = 1_048_576  # every body that nothing else is said of

log = structlog.get_logger(__name__)


class BodyLimit(NamedTuple):
    """What the bodies of some requests may have. `path` is a pattern of the whole path; `most_bytes` None: the route
    reads its body as a stream and limits it itself."""

    method: str
    path: str
    most_bytes: int | None


class RequestMiddleware:
    """Wraps the application. `limits` names the requests whose bodies may be larger than `MAX_BODY_BYTES`."""

    def __init__(self, app: ASGIApp, limits: Collection[BodyLimit]) -> None:
        self.app = app
        self._limits = [(limit, re.compile(limit.path)) for limit in limits]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._most_bytes(scope))
        scope.setdefault("state", {})["request_id"] = exchange.id
        with structlog.contextvars.bound_contextvars(request_id=exchange.id):
            try:
                await self.app(scope, exchange.receive, exchange.send)
            except ClientDisconnect:
                exchange.status = exchange.status or 499  # nobody is there to read a status: for the log only
            except Exception as error:
                log.critical("request.failed", **where(error))
                if exchange.status is None:
                    failure = ServiceError(
                        f"Something broke here; the request was {exchange.id}.", code="internal_error"
                    )
                    await response(failure, Request(scope))(scope, receive, exchange.send)
            finally:
                exchange.log()

    def _most_bytes(self, scope: Scope) -> int | None:
        for limit, path in self._limits:
            if limit.method == scope["method"] and path.fullmatch(scope["path"]):
                return limit.most_bytes
        return MAX_BODY_BYTES


class _Exchange:
    """One request and its response as they pass by."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int | None) -> None:
        self.id = "req_" + ids.random_text(24)
        self.status: int | None = None
        self._scope, self._receive, self._send = scope, receive, send
        self._started_s = monotonic_s()
        self._most_bytes = most_bytes
        self._body_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self._body_bytes += len(message.get("body", b""))
        if self._most_bytes is not None and self._body_bytes > self._most_bytes:
            raise HTTPException(413, f"The request's body is over {self._most_bytes} bytes.")
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = headers["request-id"] = self.id  # the latter is what Anthropic's client reads
            headers["x-content-type-options"] = "nosniff"
            headers.setdefault("cache-control", "no-store")
            headers.update(self._scope["state"].get("headers", {}))
        await self._send(message)

    def log(self) -> None:
        took_s = monotonic_s() - self._started_s
        took_ms = round(took_s * 1000, 1)
        quiet = self._scope["path"] in ("/livez", "/readyz", "/metrics")
        if not quiet:  # probes would drown the others
            counters.REQUESTS.labels(f"{(self.status or 500) // 100}xx").inc()
            counters.REQUEST_SECONDS.observe(took_s)
        (log.debug if quiet else log.info)(
            "request.served",
            request_id=self.id,
            method=self._scope["method"],
            path=self._scope["path"],
            status=self.status,
            ms=took_ms,
        )
