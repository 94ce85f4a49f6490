"""The lines between the calls of one engine worker and Redis: takes calls in, hears which are over, says what is new.

Three threads. The *ear* waits for calls and stops; a call is deleted as soon as it is read, so that nobody takes it
again. The *mouth* says what the source has to say. The *pulse* says every moment that this worker is there, as long as
it takes calls, and which it has, however much the mouth has to say. Where Redis doesn't answer, what was to be said is
lost, and with it the calls that it was of; a process that doesn't hear of its call for a while knows that, too.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import redis
import structlog
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from batchsvc.interactive import wire
from batchsvc.interactive.wire import Alive
from batchsvc.threads import WorkThread
from workers.interactive import CallSource, Said

_TIMEOUT_S = 2.0
_BLOCK_MS = 200
_PAUSE_S = 0.3  # after an error
_TAKES = 32  # calls at once
_MOST_NEWS = 50_000  # of a process that doesn't read: then it has lost calls
_STOPS_TTL_S = 60
_CONSUMER = "worker"  # all are one: what is read is deleted, so nothing is pending for anybody

log = structlog.get_logger(__name__)


class CallLines:
    """Runs the three threads of a worker of one model."""

    def __init__(
        self, redis_url: str, source: CallSource, *, digest: str, owner: str, on_crash: Callable[[Exception], None]
    ) -> None:
        self._source = source
        self._owner = owner
        self._calls, self._ready = wire.calls_of(digest), wire.ready_of(digest)
        self._stops = wire.stops_of(owner)
        self._redis = redis.Redis.from_url(
            redis_url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._is_stopped = False
        self._ear = WorkThread("calls-in", lambda: self._for_ever(self._listen), on_crash)
        self._mouth = WorkThread("calls-out", self._speak_on, on_crash)
        self._pulse = WorkThread("calls-pulse", lambda: self._for_ever(self._beat), on_crash)

    def start(self) -> None:
        self._ear.start()
        self._mouth.start()
        self._pulse.start()

    def stop(self, wait_s: float) -> None:
        """Take nothing more, and say what is left to say, for which it waits so long."""
        self._is_stopped = True
        self._mouth.join(wait_s)
        self._ear.join(wait_s)
        self._pulse.join(wait_s)
        self._redis.close()

    def _for_ever(self, step: Callable[[], None]) -> None:
        is_quiet = False
        while not self._is_stopped:
            try:
                step()
                is_quiet = False
            except (RedisError, OSError) as error:
                if not is_quiet:
                    log.warning("calls.unreachable", error=type(error).__name__)
                is_quiet = True
                time.sleep(_PAUSE_S)

    # ---- the ear

    def _listen(self) -> None:
        room = min(self._source.room(), _TAKES)
        streams: dict[Any, Any] = {self._stops: ">"} | ({self._calls: ">"} if room else {})
        try:
            found: Any = self._redis.xreadgroup(
                wire.GROUP, _CONSUMER, streams, count=room or _TAKES, block=_BLOCK_MS, noack=True
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._make_groups()
            return
        for stream, entries in found.items() if isinstance(found, dict) else found or ():
            for entry, fields in entries:
                self._redis.xdel(stream, entry)
                self._hear(stream, fields.get(wire.FIELD, b""))

    def _make_groups(self) -> None:
        for stream in (self._stops, self._calls):
            try:
                self._redis.xgroup_create(stream, wire.GROUP, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    def _hear(self, stream: bytes, message: bytes) -> None:
        if stream == self._stops.encode():
            self._source.stop([message.decode(errors="replace")])
            return
        try:
            call = wire.decode_call(message)
        except (ValueError, KeyError, TypeError):
            log.warning("call.unreadable", size_bytes=len(message))
            return
        self._source.begin(call)

    # ---- the mouth

    def _speak_on(self) -> None:
        self._for_ever(self._speak)
        with contextlib.suppress(RedisError, OSError):
            self._send(self._waiting(0))

    def _speak(self) -> None:
        try:
            self._send(self._waiting(_BLOCK_MS / 1000))
        except (RedisError, OSError):
            for api in self._source.open_calls():
                self._source.stop_for(api)
            raise

    def _waiting(self, wait_s: float) -> Iterator[Said]:
        """What there is to say, for which it waits a while."""
        try:
            yield self._source.outbox.get(timeout=wait_s) if wait_s else self._source.outbox.get_nowait()
            while True:
                yield self._source.outbox.get_nowait()
        except queue.Empty:
            pass

    # ---- the pulse

    def _beat(self) -> None:
        if self._source.takes_calls():
            self._redis.set(self._ready, self._owner, px=round(1000 * wire.READY_TTL_S))
        self._redis.expire(self._stops, _STOPS_TTL_S)
        self._send([Said(api, Alive(self._owner, tuple(ids))) for api, ids in self._source.open_calls().items()])
        time.sleep(wire.READY_S)

    # ---- mouth and pulse

    def _send(self, said: Iterable[Said]) -> None:
        """To each process its news; one whose stream has expired is gone."""
        apis: list[str] = []
        with self._redis.pipeline(transaction=False) as pipe:
            for api, news in said:
                apis.append(api)
                message = wire.encode_news(news)
                pipe.xadd(wire.news_of(api), {wire.FIELD: message}, maxlen=_MOST_NEWS, nomkstream=True)
            sent = pipe.execute() if apis else []
        for api in {api for api, entry in zip(apis, sent, strict=True) if entry is None}:
            self._source.stop_for(api)
