"""The loop beside the engine: sources give requests, the engine runs them, completions go back to their source.

Two threads. The *engine thread* does nothing but `engine.step()`. The *pump thread* keeps the engine's waiting set
filled (at most `waiting_requests` beyond the running ones, so that a better-ranked request never waits behind many)
and hands out what ended. A crash of either ends the process: `failure` is the sentence for its last line.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import structlog

from batchsvc import logs
from engine.errors import RequestError
from engine.request import Completion, Expectation, Request, StepOutput
from workers.thread import WorkThread

log = structlog.get_logger(__name__)

_LAST_STEP_S = 5.0  # how long the end of the process waits for a step under way
_LOOK_S = 0.05  # the longest that a thread sleeps while there may be something to do


class Stats(Protocol):
    """What the pump reads of the engine's own counts."""

    @property
    def running(self) -> int: ...


class EngineLike(Protocol):
    """The engine, or the fake one. `add`, `abort` and `expect` may be called while another thread steps."""

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def expect(self, name: str, expectation: Expectation | None) -> None: ...
    def step(self) -> StepOutput: ...
    def has_work(self) -> bool: ...
    def stats(self) -> Any: ...
    def close(self) -> None: ...


class Source(Protocol):
    """Where requests come from and completions go to. Called on the pump thread only."""

    def announce(self) -> list[tuple[str, Expectation | None]]:
        """What the engine may expect under which name, or no longer (None), since the last call."""

    def take(self, room: int) -> list[Request]:
        """At most `room` requests to run now; may fetch more work for the next call. Must not raise."""

    def finish(self, completion: Completion) -> None:
        """One of its requests ended. It isn't called for requests that the source had aborted."""

    def refuse(self, request_id: str, error: RequestError) -> None:
        """The engine didn't take one of its requests."""


class Pump:
    """Joins one engine with its sources."""

    def __init__(
        self, engine: EngineLike, *, waiting_requests: int, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.failure: str | None = None
        self._engine = engine
        self._sources: list[Source] = []
        self._waiting_requests = waiting_requests
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._inside: dict[str, Source] = {}  # requests in the engine, by id
        self._started: set[str] = set()  # those that have a first token
        self._ended: deque[Completion] = deque()
        self._wake = threading.Event()
        self._work = threading.Event()
        self._stopped = threading.Event()
        self._threads = (
            WorkThread("engine", self._step_engine, self.crashed),
            WorkThread("pump", self._feed_engine, self.crashed),
        )

    def attach(self, source: Source) -> None:
        """Add a source; before `start`."""
        self._sources.append(source)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; what runs in the engine is not finished."""
        self._stopped.set()
        self._wake.set()
        self._work.set()
        for thread in self._threads:
            thread.join(_LAST_STEP_S)

    def wake(self) -> None:
        """Look at the sources now."""
        self._wake.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Take requests out of the engine; their completions are dropped. Thread-safe."""
        for request_id in request_ids:
            with self._lock:
                inside = self._inside.pop(request_id, None) is not None
                self._started.discard(request_id)
            if inside:
                self._engine.abort(request_id)
        self._wake.set()

    def has_started(self, request_id: str) -> bool:
        """Whether a request in the engine has its first token."""
        with self._lock:
            return request_id in self._started

    def fail(self, sentence: str) -> None:
        """Note why the process can't go on, once, and have it ended."""
        if self.failure is None:
            self.failure = sentence
            self._stopped.set()
            self._on_failure()

    def _step_engine(self) -> None:
        while not self._stopped.is_set():
            if not self._engine.has_work():
                self._work.wait(_LOOK_S)
                self._work.clear()
                continue
            output = self._engine.step()
            with self._lock:
                self._started.update(output.new_tokens.keys() & self._inside.keys())
            if output.completions:
                self._ended.extend(output.completions)
                self._wake.set()

    def _feed_engine(self) -> None:
        while not self._stopped.is_set():
            self._hand_out()
            self._fill()
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _hand_out(self) -> None:
        while self._ended:
            completion = self._ended.popleft()
            with self._lock:
                source = self._inside.pop(completion.request_id, None)
                self._started.discard(completion.request_id)
            if source is not None:
                source.finish(completion)

    def _fill(self) -> None:
        for source in self._sources:
            with self._lock:
                inside = len(self._inside)
            for name, expectation in source.announce():
                self._engine.expect(name, expectation)
            room = self._waiting_requests - max(0, inside - self._running())
            for request in source.take(max(0, room)):
                self._add(source, request)

    def _running(self) -> int:
        stats: Stats = self._engine.stats()
        return stats.running

    def _add(self, source: Source, request: Request) -> None:
        with self._lock:
            self._inside[request.id] = source
        try:
            self._engine.add(request)
        except RequestError as error:
            with self._lock:
                del self._inside[request.id]
            source.refuse(request.id, error)
        self._work.set()

    def crashed(self, error: Exception) -> None:
        """A thread of this process ended by an exception."""
        log.error("worker.crashed", **logs.where(error))
        self.fail(f"The engine worker stopped: {type(error).__name__}: {error}".splitlines()[0])
