"""The calls of one API process: connects each with an engine worker through Redis, and hears what comes of them.

1. `connect` asks whether a worker of the model is there, puts the call where the workers read, and waits until one has
   taken it. It fails within two seconds of the moment that Redis doesn't answer, or that no worker is there: what it
   asks of Redis before it waits shares one deadline, and each look while it waits has one of its own.
2. One task reads all news and gives each to its call's line; what was read is trimmed.
3. Another renews what tells the workers that this process lives, and fails the lines of which nothing was heard for
   too long: workers say often which calls they have. Silence is counted by what was read, not by the clock: a process
   that has much to do may come to read late, and its workers live all the same.
4. `hang_up` ends a call that nobody waits for any more: its worker is told so.

Nothing here is kept: a call is lost with its connection. All of it runs on one event loop, that of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from batchsvc import ids
from batchsvc.errors import OverloadedError, UnavailableError
from batchsvc.interactive import wire
from batchsvc.interactive.line import Line, lost
from batchsvc.interactive.wire import Alive, NewCall, News, Taken

T = TypeVar("T")

_REACH_S = 1.5  # the longest that a call waits for Redis: from its start, or from the last look that Redis answered
_LOOK_S = 0.25  # how often a call that nobody took looks for workers
_TAKE_S = 10.0  # how long live workers may leave a call
_READ_MS = 500
_READ_COUNT = 256
_TURNS = 8  # of the event loop
_MUCH_BYTES = 65_536  # of a message: reading it would hold up all other calls
_MOST_CALLS = 10_000  # entries of a stream, far beyond what is ever there
_MOST_STOPS = 1_000
_MOST_LOGPROBS = 1_000_000  # of all calls at once: they stay until an answer is whole, some hundred bytes each
_CALLS_TTL_S = 60  # of a stream that nobody adds to

log = structlog.get_logger(__name__)


class Switchboard:
    """`most_calls` at once; `most_bytes` may wait for the client of each."""

    def __init__(self, redis_url: str, *, most_calls: int, most_bytes: int) -> None:
        self.id = ids.random_text(20)
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._num_calls = 0
        self._num_logprobs = 0
        self._lines: dict[str, Line] = {}
        self._news = wire.news_of(self.id)
        self._last: Any = b"0"  # id of the news that was read last
        self._read_s = 0.0  # all news of a time before this one were read, or Redis didn't answer; by the loop's clock
        self._redis = redis.asyncio.Redis.from_url(
            redis_url,
            socket_timeout=_REACH_S + _READ_MS / 1000,
            socket_connect_timeout=_REACH_S,
            retry=Retry(NoBackoff(), 0),  # who waits for an answer must learn at once that there will be none
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False
        self._asides: set[asyncio.Task[None]] = set()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """One of the calls that this process may have at once. Raises OverloadedError where they are all in use."""
        if self._num_calls >= self._most_calls:
            says = f"This server has {self._most_calls} calls already, and takes no more at once: try again soon."
            raise OverloadedError(says, code="too_many_calls")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    @contextmanager
    def room_for(self, num_logprobs: int) -> Iterator[None]:
        """Memory for the logprobs of a call. Raises OverloadedError where other calls may need it."""
        if num_logprobs and self._num_logprobs + num_logprobs > _MOST_LOGPROBS:
            says = (
                f"The calls that run can have {self._num_logprobs:,} logprobs, and this one {num_logprobs:,}, of"
                f" {_MOST_LOGPROBS:,} that this server keeps at once: try again soon, or ask for fewer."
            )
            raise OverloadedError(says, code="too_many_calls")
        self._num_logprobs += num_logprobs
        try:
            yield
        finally:
            self._num_logprobs -= num_logprobs

    async def connect(self, digest: str, call: NewCall) -> Line:
        """A line to the worker that has taken the call. Raises UnavailableError, or OverloadedError where workers have
        no room for long; then nobody has it."""
        line = self._lines[call.id] = Line(call.id, most_bytes=self._most_bytes, now_s=_now_s())
        entry: bytes | None = None
        until_s = _now_s() + _REACH_S
        try:
            self._start_tasks()
            await self._reach(self._announce(digest), until_s)
            entry = await self._reach(self._add(wire.calls_of(digest), wire.encode_call(call), _MOST_CALLS), until_s)
            await self._wait_until_taken(line, digest, entry, until_s)
        except BaseException:
            self._drop(line)
            if line.worker is not None and not line.is_over:
                self._aside(self._stop(call.id, line.worker))
            elif entry is not None:
                self._aside(self._withdraw(digest, entry))
            raise
        return line

    def hang_up(self, line: Line) -> None:
        """Nobody waits for this call any more, whether it has ended or not."""
        if self._drop(line) and not line.is_over and line.worker is not None:
            self._aside(self._stop(line.call_id, line.worker))

    async def close(self) -> None:
        """End the tasks and the connections."""
        self._is_closed = True  # an answer of Redis that comes with the cancellation can swallow it
        tasks = [*self._tasks, *self._asides]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.delete(self._news)
        await self._redis.aclose()

    # ---- towards the workers

    async def _announce(self, digest: str) -> None:
        """Have the stream of this process's news be there. Raises UnavailableError if no worker of the model is."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.pexpire(self._news, _ms(wire.NEWS_TTL_S))
            pipe.exists(wire.ready_of(digest))
            is_kept, is_ready = await pipe.execute()
        if not is_ready:
            raise _nobody_there()
        if not is_kept:
            await self._keep()

    async def _keep(self) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.exists(self._news)
            pipe.xadd(self._news, {wire.FIELD: wire.encode_news(Alive("", ()))})
            pipe.pexpire(self._news, _ms(wire.NEWS_TTL_S))
            was_there, *_ = await pipe.execute()
        if not was_there:  # its ids are times, of a clock that may have been put back
            self._last = b"0"

    async def _add(self, stream: str, message: bytes, most: int) -> bytes:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.xadd(stream, {wire.FIELD: message}, maxlen=most)
            pipe.expire(stream, _CALLS_TTL_S)
            return bytes((await pipe.execute())[0])

    async def _wait_until_taken(self, line: Line, digest: str, entry: bytes, until_s: float) -> None:
        """`until_s` is how long Redis has for the first look, by the loop's clock."""
        end_s = _now_s() + _TAKE_S
        missed_s: float | None = None  # when the call was seen to be out of the stream, and nobody had said so
        while line.worker is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await line.changed()
                continue
            is_ready, is_waiting = await self._reach(self._look_for(digest, entry), until_s)
            now_s = _now_s()
            until_s = now_s + _REACH_S
            if not is_ready:
                raise _nobody_there()
            if is_waiting and now_s > end_s:
                says = "The engine workers of this model have as many calls as they take at once: try again soon."
                raise OverloadedError(says, code="too_many_calls")
            if not is_waiting:
                missed_s = missed_s or now_s
                if self._read_s - missed_s > wire.READY_TTL_S:  # whoever took it died before a word
                    raise lost()

    async def _look_for(self, digest: str, entry: bytes) -> tuple[bool, bool]:
        """Whether a worker is there, and whether the call still waits for one."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.exists(wire.ready_of(digest))
            pipe.xrange(wire.calls_of(digest), entry, entry)
            is_ready, found = await pipe.execute()
        return bool(is_ready), bool(found)

    async def _reach(self, ask: Awaitable[T], until_s: float) -> T:
        """What Redis answers. Raises UnavailableError if it doesn't until then, by the loop's clock."""
        try:
            async with asyncio.timeout_at(until_s):
                return await ask
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("calls.unreachable", error=type(error).__name__)
            says = "Interactive calls can't be passed on now, because Redis doesn't answer: try again soon."
            raise UnavailableError(says, code="queue_unavailable") from error

    async def _stop(self, call_id: str, worker: str) -> None:
        stream = wire.stops_of(worker)
        await self._redis.xadd(stream, {wire.FIELD: call_id}, maxlen=_MOST_STOPS, nomkstream=True)

    async def _withdraw(self, digest: str, entry: bytes) -> None:
        await self._redis.xdel(wire.calls_of(digest), entry)

    def _drop(self, line: Line) -> bool:
        return self._lines.pop(line.call_id, None) is not None

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that no caller waits for. If it fails, nothing is lost: workers see for themselves, later."""

        async def quietly() -> None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(_REACH_S):
                    await work

        task = asyncio.create_task(quietly())
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    # ---- from the workers

    def _start_tasks(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._for_ever(step)) for step in (self._read, self._look)]

    async def _for_ever(self, step: Callable[[], Awaitable[None]]) -> None:
        is_quiet = False
        while not self._is_closed:
            try:
                await step()
                is_quiet = False
            except Exception as error:  # whatever it is, this process must not go deaf
                if not is_quiet:
                    log.warning("calls.unheard", error=type(error).__name__)
                is_quiet = True
                await asyncio.sleep(_LOOK_S)

    async def _read(self) -> None:
        """Read what is new."""
        began_s, num_read = _now_s(), 0
        try:
            found: Any = await self._redis.xread({self._news: self._last}, count=_READ_COUNT, block=_READ_MS)
            for _, entries in found.items() if isinstance(found, dict) else found or ():
                num_read += len(entries)
                for self._last, fields in entries:
                    await self._hear(fields.get(wire.FIELD, b""))
                await self._redis.xtrim(self._news, minid=self._last, approximate=False)
        finally:
            if num_read < _READ_COUNT:  # else there is probably more
                self._read_s = began_s

    async def _look(self) -> None:
        for line in list(self._lines.values()):
            if line.worker is not None and not line.is_over and self._read_s - line.heard_s > wire.SILENCE_S:
                line.fail(lost())
        if self._lines and not await self._redis.pexpire(self._news, _ms(wire.NEWS_TTL_S)):
            await self._keep()
        await asyncio.sleep(_LOOK_S)

    async def _hear(self, message: bytes) -> None:
        try:
            if len(message) < _MUCH_BYTES:
                news = wire.decode_news(message)
            else:
                news = await asyncio.to_thread(wire.decode_news, message)
            await self._pass_on(news)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            log.warning("calls.unreadable", size_bytes=len(message))

    async def _pass_on(self, news: News) -> None:
        if isinstance(news, Alive):
            for call_id in news.call_ids:
                self._hear_of(call_id, news.worker)
            return
        line = self._lines.get(news.call_id)
        if line is not None:
            line.push(news, _now_s())
            await self._let_read(line)
        elif isinstance(news, Taken):  # too late: nobody waits any more
            self._aside(self._stop(news.call_id, news.worker))

    async def _let_read(self, line: Line) -> None:
        """A reader that isn't stuck in sending takes what waits as soon as it gets its turn."""
        for _ in range(_TURNS):
            if not line.is_overfull:
                return
            await asyncio.sleep(0)
        if line.is_overfull:
            line.overflow()

    def _hear_of(self, call_id: str, worker: str) -> None:
        line = self._lines.get(call_id)
        if line is not None:
            line.heard_s = _now_s()
        else:  # it hasn't heard that nobody waits
            self._aside(self._stop(call_id, worker))


def _nobody_there() -> UnavailableError:
    says = "No engine worker of this model takes calls now: start one, or try again soon."
    return UnavailableError(says, code="no_worker")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _ms(seconds: float) -> int:
    return round(1000 * seconds)
