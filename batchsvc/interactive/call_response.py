"""The response to one interactive call, from its connection to a worker until its client has all of it, or is gone.

Nothing is sent before the first text, so that whatever fails until then has a status of its own; afterwards a failure
is the last thing in the stream. A client that goes away, or stops reading, before the answer is whole ends its call:
its worker is told, and nothing is charged. An answer is whole when its end has come here, whether or not its client has
read it: it is charged once, however long that takes, and sent as far as its client takes it. Who is told of a failure
isn't charged, unless the database took the charge and went away before it said so.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import ExitStack

import structlog
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from batchsvc.db.session import Database
from batchsvc.errors import ServiceError, UnavailableError
from batchsvc.http.errors import response
from batchsvc.interactive import service
from batchsvc.interactive.line import Line
from batchsvc.interactive.service import PreparedCall
from batchsvc.interactive.shapes import stream_of, whole_body
from batchsvc.interactive.switchboard import Switchboard
from batchsvc.interactive.wire import Ended, Grown
from batchsvc.json_bytes import one_line_json
from batchsvc.logs import where
from batchsvc.settings import Settings

_EVENTS = b"text/event-stream; charset=utf-8"
_RENEW_S = service.HOLD_S / 3

log = structlog.get_logger(__name__)


class CallResponse(Response):
    """Runs the call when the server asks for its response. Closes `slot` at its end."""

    def __init__(
        self, switchboard: Switchboard, db: Database, settings: Settings, call: PreparedCall, slot: ExitStack
    ) -> None:
        super().__init__()
        self._switchboard = switchboard
        self._db = db
        self._settings = settings
        self._call = call
        self._slot = slot
        self._stream = stream_of(call.priced.endpoint, call.head)
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        held = asyncio.create_task(self._go_on_holding())
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            held.cancel()
            gone.cancel()
            work.cancel()
            ended, *_ = await asyncio.gather(work, gone, held, return_exceptions=True)
            await self._let_go()  # not in `work`: what was sent to its end counts as gone, and cancels that
        if isinstance(ended, Exception):
            raise ended

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._switchboard.room_for(self._call.asked.most_logprobs):
                await self._converse(send)
        except TimeoutError:
            says = (
                f"The answer wasn't whole after {self._settings.interactive_timeout_s:g} s, the most that a call has."
            )
            await self._fail(UnavailableError(says, code="call_timeout"), scope, receive, send)
        except SQLAlchemyError as error:
            log.warning("database.failed", **where(error))
            what = "its end isn't given" if self._has_begun else "isn't given"
            says = f"The database doesn't answer, so the answer can't be charged, and {what}: try again."
            await self._fail(UnavailableError(says, code="database_unavailable"), scope, receive, send)
        except ServiceError as error:
            await self._fail(error, scope, receive, send)
        finally:
            self._slot.close()

    async def _converse(self, send: Send) -> None:
        until_s = asyncio.get_running_loop().time() + self._settings.interactive_timeout_s
        async with asyncio.timeout_at(until_s):
            line = await self._switchboard.connect(self._call.digest, self._call.message(self._switchboard.id))
        try:
            ended = await self._listen(send, line, until_s)
        except asyncio.CancelledError:
            if line.whole is not None:
                await _to_its_end(functools.partial(self._charge, line.whole))
            raise
        finally:
            self._switchboard.hang_up(line)
        data = await _to_its_end(functools.partial(self._charge, ended))
        if self._call.streams:
            await self._begin(send, _EVENTS)
        else:
            await self._begin(send, b"application/json", content_length=len(data))
        await self._push(send, data, is_last=True)

    async def _listen(self, send: Send, line: Line, until_s: float) -> Ended:
        """What the worker says, until the answer is whole; of a stream, its text is sent as it comes."""
        task = asyncio.current_task()
        assert task is not None, "this runs in a task"
        line.on_overflow = task.cancel  # it may be stuck in sending
        while not isinstance(news := await _next(line, until_s), Ended):
            for data in self._stream.grow(news.texts) if self._call.streams else ():
                await self._begin(send, _EVENTS)
                await self._push(send, data)
        return news

    def _charge(self, ended: Ended) -> bytes:
        """Put the answer into the books. What its client still has to get: made here, because it can be much."""
        answered = service.charge(self._db, self._call, ended)
        if self._call.streams:
            return b"".join(self._stream.end(answered, ended.completion))
        return one_line_json(whole_body(answered, ended.completion))

    async def _begin(self, send: Send, content_type: bytes, content_length: int | None = None) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        headers = [(b"content-type", content_type), (b"x-accel-buffering", b"no")]  # a proxy must not collect events
        if content_length is not None:
            headers.append((b"content-length", str(content_length).encode()))
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})

    async def _push(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        await self._send(send, {"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _send(self, send: Send, message: Message) -> None:
        """Send some, if the client takes it within its time: what it didn't read may be of a call before."""
        try:
            async with asyncio.timeout(self._settings.interactive_stall_s):
                await send(message)
        except TimeoutError as error:
            raise asyncio.CancelledError from error  # nobody is there to be told

    async def _fail(self, error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
        log.info("call.failed", call=self._call.priced.id, code=error.code)
        if not self._has_begun:
            await response(error, Request(scope))(scope, receive, functools.partial(self._send, send))
        else:
            await self._push(send, self._stream.fail(error), is_last=True)

    async def _go_on_holding(self) -> None:
        while self._call.is_held:
            await asyncio.sleep(_RENEW_S)
            try:
                await run_in_threadpool(service.keep_hold, self._db, self._call)
            except SQLAlchemyError as error:  # it goes on for a while by itself
                log.warning("call.not_held", call=self._call.priced.id, error=type(error).__name__)

    async def _let_go(self) -> None:
        if not self._call.is_held:
            return
        try:
            await run_in_threadpool(service.let_go, self._db, self._call)
        except SQLAlchemyError as error:  # it expires by itself
            log.warning("call.still_held", call=self._call.priced.id, error=type(error).__name__)


async def _next(line: Line, until_s: float) -> Grown | Ended:
    """The next news, by a time of the loop's clock; once the answer is whole, its client may take longer. Raises
    TimeoutError, and the error of a call that failed."""
    if not line.is_over and asyncio.get_running_loop().time() >= until_s:
        raise TimeoutError
    try:
        async with asyncio.timeout_at(until_s):
            return await line.next()
    except TimeoutError:
        if line.whole is None:
            raise
        return await line.next()  # it came at that moment


async def _to_its_end(work: Callable[[], bytes]) -> bytes:
    """What a thread makes. Whoever is cancelled meanwhile waits for it: nothing stops a thread."""
    made = asyncio.ensure_future(run_in_threadpool(work))
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        await asyncio.wait((made,))
        if (error := made.exception()) is not None:  # there is nobody to be told
            log.warning("call.not_charged", error=type(error).__name__)
        raise


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
