"""The loop beside the engine: sources give requests, the engine runs them, completions go back to their source.

Two threads. The *engine thread* does nothing but `engine.step()`. The *pump thread* keeps the engine's waiting set
filled (at most `waiting_requests` answers beyond the running ones, so that a better-ranked request never waits behind
many) and hands out what ended; it waits for neither store nor database. What was generated for a request is kept until
its completion was handed out, so that it can be saved. A crash of either thread ends the process, and so does an engine
that has work and gets nowhere: `failure` is the sentence for its last line.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import structlog

from batchsvc import logs
from batchsvc.clock import monotonic_s
from batchsvc.errors import ServiceError
from batchsvc.threads import WorkThread
from engine.errors import DeviceError, EngineError, RequestError
from engine.request import Completion, Expectation, NewText, Request, StepOutput
from workers.exits import WorkerExit
from workers.generated import Generated, Growing

log = structlog.get_logger(__name__)

_LAST_STEP_S = 5.0  # how long the end of the process waits for a step under way
_LOOK_S = 0.05  # the longest that a thread sleeps while there may be something to do


class Stats(Protocol):
    """What the pump reads of the engine's own counts."""

    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...


class EngineLike(Protocol):
    """The engine, or the fake one. `add`, `abort` and `expect` may be called while another thread steps."""

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def expect(self, name: str, expectation: Expectation | None) -> None: ...
    def step(self) -> StepOutput: ...
    def has_work(self) -> bool: ...
    def stats(self) -> Any: ...
    def signals(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Source(Protocol):
    """Where requests come from and completions go to. Called on the pump thread only."""

    def announce(self) -> list[tuple[str, Expectation | None]]:
        """What the engine may expect under which name, or no longer (None), since the last call."""

    def take(self, room: int) -> list[Request]:
        """Requests to run now, until their answers are `room` or more; may fetch more work for the next call. Must not
        raise."""

    def finish(self, completion: Completion) -> None:
        """One of its requests ended. It isn't called for requests that the source had aborted."""

    def refuse(self, request_id: str, error: RequestError) -> None:
        """The engine didn't take one of its requests."""

    def grow(self, request_id: str, texts: list[NewText]) -> None:
        """Text became certain of one of its streamed requests."""


class _Inside(NamedTuple):
    """A request in the engine: whose it is, and how many answers it has."""

    source: Source
    answers: int


class _Growth(NamedTuple):
    """New text of a streamed request."""

    request_id: str
    texts: list[NewText]


class Pump:
    """Joins one engine with its sources."""

    def __init__(
        self, engine: EngineLike, *, waiting_requests: int, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.failure: str | None = None
        self.exit_code = WorkerExit.STOPPED
        self.busy_s = 0.0  # that the engine was stepping
        self._engine = engine
        self._sources: list[Source] = []
        self._waiting_requests = waiting_requests
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._inside: dict[str, _Inside] = {}  # requests in the engine, by id
        self._generated: dict[str, Growing] = {}  # new tokens of those that have any
        self._withdrawn: set[str] = set()  # taken out of the engine, but their tokens are wanted
        self._leaving: set[str] = set()  # those of them that the engine hasn't let go of yet
        self._is_filling = False  # sources have given requests that aren't inside yet
        self._missed: set[str] = set()  # what was aborted meanwhile and wasn't inside: perhaps one of these
        self._mark = (0, 0)  # how far the engine was when it was last seen to move
        self._still_s = 0.0
        self._ended: deque[Completion | _Growth] = deque()
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

    def stop(self, step_s: float = _LAST_STEP_S) -> None:
        """End both threads, and hand out what ended with the last step, for which it waits `step_s` at most; what else
        runs in the engine stays as it is."""
        self._stopped.set()
        self._wake.set()
        self._work.set()
        for thread in self._threads:
            thread.join(step_s)
        self._hand_out()

    def wake(self) -> None:
        """Look at the sources now."""
        self._wake.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Take requests out of the engine; their completions are dropped. Thread-safe."""
        for request_id in request_ids:
            with self._lock:
                inside = self._leave(request_id)
                self._generated.pop(request_id, None)
            if inside:
                self._engine.abort(request_id)
        self._wake.set()

    def _leave(self, request_id: str) -> bool:
        """Whether a request was inside; it isn't any more. The caller holds the lock."""
        inside = self._inside.pop(request_id, None) is not None
        if not inside and self._is_filling:
            self._missed.add(request_id)
        return inside

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """As `abort`, but waits until the engine has let go of them, and what it generated until then stays known: at a
        drain no token is lost."""
        with self._lock:
            inside = [request_id for request_id in request_ids if self._leave(request_id)]
            self._withdrawn.update(inside)
            self._leaving.update(inside)
        for request_id in inside:
            self._engine.abort(request_id)
        end_s = monotonic_s() + _LAST_STEP_S
        while self._leaving and monotonic_s() < end_s and not self._stopped.is_set():
            time.sleep(_LOOK_S)

    def generated(self, request_id: str) -> Generated | None:
        """What was generated so far for a request whose completion hasn't been handed out; None: nothing."""
        with self._lock:
            found = self._generated.get(request_id)
            return found.so_far() if found else None

    def has_started(self, request_id: str) -> bool:
        """Whether a request in the engine has its first token."""
        with self._lock:
            return request_id in self._generated

    def look_for_a_hang(self, elapsed_s: float, hung_s: float) -> None:
        """To be called often, with the time since the last call: fails when the engine has work and for `hung_s` has
        computed nothing. Time in which this process didn't run at all doesn't count."""
        stats: Stats = self._engine.stats()
        mark = (stats.output_tokens, stats.computed_tokens)
        num_open = stats.running + stats.waiting
        if mark != self._mark or not num_open:
            self._mark, self._still_s = mark, 0.0
            return
        self._still_s += min(elapsed_s, 1.0)
        if self._still_s >= hung_s:
            self.fail(f"The engine hangs: it gave no token for {hung_s:g} s while it had {num_open} requests.")

    def fail(self, sentence: str, exit_code: WorkerExit = WorkerExit.FAILED) -> None:
        """Note why the process can't go on, once, and have it ended."""
        if self.failure is None:
            self.failure, self.exit_code = sentence, exit_code
            self._stopped.set()
            self._on_failure()

    def _step_engine(self) -> None:
        while not self._stopped.is_set():
            if not self._engine.has_work():
                self._work.wait(_LOOK_S)
                self._work.clear()
                continue
            began_s = monotonic_s()
            output = self._engine.step()
            self.busy_s += monotonic_s() - began_s - output.idle_s
            with self._lock:
                self._note(output)
            if output.completions or output.texts:
                self._ended.extend(_Growth(*one) for one in output.texts.items())
                self._ended.extend(output.completions)
                self._wake.set()

    def _note(self, output: StepOutput) -> None:
        for request_id in output.new_tokens:
            found = self._generated.get(request_id)
            if found is None:
                found = self._generated[request_id] = Growing(output.hit_tokens.get(request_id, 0))
            found.add(output.tokens_of(request_id))

    def _feed_engine(self) -> None:
        while not self._stopped.is_set():
            self._hand_out()
            self._fill()
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _hand_out(self) -> None:
        while self._ended:
            completion = self._ended.popleft()
            if isinstance(completion, _Growth):
                self._tell(completion)
                continue
            with self._lock:
                inside = self._inside.pop(completion.request_id, None)
            if inside is not None:
                inside.source.finish(completion)
            with self._lock:  # only now: a line is known as running, as finished, or for a moment as both
                self._leaving.discard(completion.request_id)
                if completion.request_id not in self._withdrawn:
                    self._generated.pop(completion.request_id, None)

    def _tell(self, growth: _Growth) -> None:
        with self._lock:
            inside = self._inside.get(growth.request_id)
        if inside is not None:
            inside.source.grow(growth.request_id, growth.texts)

    def _fill(self) -> None:
        for source in self._sources:
            with self._lock:
                inside = sum(request.answers for request in self._inside.values())
            for name, expectation in source.announce():
                self._engine.expect(name, expectation)
            room = self._waiting_requests - max(0, inside - self._running())
            with self._lock:
                self._is_filling = True
            for request in source.take(max(0, room)):
                self._add(source, request)
            with self._lock:
                self._is_filling = False
                self._missed.clear()

    def _running(self) -> int:
        stats: Stats = self._engine.stats()
        return stats.running

    def _add(self, source: Source, request: Request) -> None:
        with self._lock:
            if request.id in self._missed:
                return
            self._inside[request.id] = _Inside(source, request.n)
        try:
            self._engine.add(request)
        except RequestError as error:
            with self._lock:
                is_wanted = self._inside.pop(request.id, None) is not None
                self._leaving.discard(request.id)
            if is_wanted:
                source.refuse(request.id, error)
        else:
            with self._lock:
                is_wanted = request.id in self._inside
            if not is_wanted:  # it was aborted just before the engine knew it
                self._engine.abort(request.id)
        self._work.set()

    def crashed(self, error: Exception) -> None:
        """A thread of this process ended by an exception."""
        log.error("worker.crashed", **logs.where(error))
        if isinstance(error, DeviceError):
            self.fail(f"The engine worker stopped: {error}", WorkerExit.DEVICE)
            return
        self.fail(f"The engine worker stopped: {told(error)}".splitlines()[0])


def told(error: Exception) -> str:
    """What an operator may read of an exception that ended a worker. The text of one that isn't ours, or that answers
    a caller, may hold what users sent: then the log has its place."""
    if isinstance(error, ServiceError) and error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return error.message
    name = type(error).__name__
    if isinstance(error, EngineError):
        return f"{name}: {error}"
    if isinstance(error, OSError) and error.strerror:  # without the name of a file
        return f"{name}: {error.strerror} (see worker.crashed in its log)."
    return f"{name} (see worker.crashed in its log)."
