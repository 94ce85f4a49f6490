"""What a Celery worker owns beside its tasks: the engine process with engine, pump, leases and writer, and its drain.

SIGTERM sets a flag (in the signal handler, without a lock), then Celery's shutdown calls `stop`, which drains:

    at once               claim nothing, take out of the engine what hasn't begun, give its units back
    until grace - margin  let running sequences finish
    then                  stop the engine; write what is finished, save what was generated of the rest
    grace - margin / 4    give back, in one statement, whatever is still leased

A second signal skips the waiting. SIGKILL at any moment is covered by the leases.

A guard thread waits for nothing and does what has to be done even when all else hangs: it fences units whose lease
can't be renewed, and ends the process when the engine gets nowhere.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
from celery import bootsteps
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from batchsvc import failpoints
from batchsvc.batches import finalize_queries, unit_queries, worker_queries
from batchsvc.batches.offpeak import Night
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.batches.worker_queries import Place
from batchsvc.clock import monotonic_s, now_ms
from batchsvc.db.session import Database
from batchsvc.dispatch import Dispatcher
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from batchsvc.threads import WorkThread
from engine.config import Formats, fingerprint
from workers.breaker import Breaker
from workers.call_lines import CallLines
from workers.exits import WorkerExit
from workers.intake import Intake
from workers.interactive import CallSource
from workers.lease import Beat, LeaseKeeper
from workers.pump import EngineLike, Pump
from workers.switching import Switcher
from workers.units import UnitSource
from workers.writer import Writer

_MOST_MARGIN_S = 10.0  # of the grace, for writing parts and giving units back
_LAST_WRITE_S = 1.0  # how long the end waits for a write or a renewal under way
_GUARD_S = 0.1
_LOOK_S = 0.02
_LOOP_S = 0.1

log = structlog.get_logger(__name__)


class EngineRun:
    """One engine process: serves one model until it is told to stop, or its engine fails."""

    def __init__(
        self,
        settings: Settings,
        db: Database,
        store: ObjectStore,
        dispatcher: Dispatcher,
        engine: EngineLike,
        *,
        digest: str,
        owner: str,
        formats: Formats | None = None,
        device: str = "cpu",
        quality: dict[str, Any] | None = None,
        on_failure: Callable[[], None] | None = None,
        note: Callable[[], str | None] | None = None,
        place: Callable[[], Place] = Place,
        problems: Callable[[], list[str]] = list,
    ) -> None:
        self.digest = digest
        self.switcher: Switcher | None = None
        self.swap_began_s: float | None = None  # when the process before this one decided to change over
        self._place = place
        self._problems = problems
        self._drained: str | None = None  # why an operator lets it begin nothing
        self._note = note or _nothing  # what the engine waits for, in a sentence; meanwhile nothing is begun
        self._formats = formats  # None: the fake engine has no weights
        self._quality = quality
        self.owner = owner
        self._settings = settings
        self._db = db
        self._lease_db = Database(settings.database_url, pool_size=1)
        self._dispatcher = dispatcher
        self._engine = engine
        self._signals = 0
        self._is_drained = False
        self._has_crashed = False  # with what its units did: their leases end as crashes
        self._open_at_failure: int | None = None  # calls
        self._seen_busy = (0.0, monotonic_s())  # at the last heartbeat: seconds that the engine was stepping, and when
        self._night = Night.from_settings(settings)
        self._ended = threading.Event()
        self._breaker = Breaker()
        self._pump = Pump(
            engine, waiting_requests=settings.waiting_requests, on_failure=on_failure or _end_this_process
        )
        answers_by = fingerprint(digest, formats, device)
        self._units = UnitSource(
            db,
            breaker=self._breaker,
            engine=self._pump,
            on_end=self._unit_ended,
            fingerprint=answers_by,
            may_claim=self._may_begin,
            calls_run=lambda: self._calls.num_running() > 0,
        )
        self._leases = LeaseKeeper(
            self._lease_db,
            owner,
            digest=digest,
            lease_s=settings.lease_s,
            renew_s=settings.renew_s,
            beat=self._beat,
            breaker=self._breaker,
            on_lost=self._units.lost,
            on_stop=self._units.stop,
            on_crash=self._pump.crashed,
            on_drain=self._ordered,
            place=place,
        )
        self._writer = Writer(
            db,
            store,
            self._leases,
            flush_s=settings.flush_s,
            flush_bytes=settings.flush_bytes,
            breaker=self._breaker,
            unfinished=self._units.unfinished,
            on_end=self._units.ended,
            on_lost=self._units.lost,
            on_crash=self._pump.crashed,
        )
        self._units.connect(self._leases, self._writer)
        self._intake = Intake(
            db,
            store,
            self._units,
            self._leases,
            self._writer,
            digest=digest,
            owner=owner,
            lease_s=settings.lease_s,
            poll_s=settings.poll_s,
            breaker=self._breaker,
            is_night=lambda: self._night.is_open(now_ms()),
            on_crash=self._pump.crashed,
        )
        self._calls = CallSource(
            engine=self._pump,
            owner=owner,
            most_calls=settings.interactive_max,
            fingerprint=answers_by,
            may_take=self._may_begin,
            must_wait=self._units.holds_suspect,
        )
        self._lines = CallLines(
            settings.redis_url, self._calls, digest=digest, owner=owner, on_crash=self._pump.crashed
        )
        self._pump.attach(self._calls)  # first: somebody waits for these
        self._pump.attach(self._units)
        self._guard = WorkThread("guard", self._watch, self._pump.crashed)

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself, in one sentence."""
        return self._pump.failure

    @property
    def exit_code(self) -> WorkerExit:
        """Of this process, where the engine stopped by itself."""
        return self._pump.exit_code

    def start(self) -> None:
        """Register as a worker and start the threads."""
        self._db.run(self._register)
        self._leases.start()
        self._writer.start()
        self._pump.start()
        self._intake.start()
        self._lines.start()
        self._guard.start()
        if self.switcher is not None:
            self.switcher.start()
        log.info("worker.ready", worker=self.owner, model=self.digest[:16])

    def may_change_over(self) -> bool:
        """Whether this process goes on, and an operator lets it."""
        return not self._signals and self.failure is None and self._drained is None

    def change_over(self) -> None:
        """Drain, and then be the process that serves another model, unless this one is told to end meanwhile."""
        os.kill(os.getpid(), signal.SIGHUP)  # another one than supervisors send: the two don't become one

    def must_end(self) -> bool:
        """Whether the process ends when it has drained, whatever it was to change over to."""
        changes_over = self.switcher is not None and self.switcher.baton is not None
        return not changes_over or self.failure is not None or self._signals > 1

    def crashed(self, error: Exception) -> None:
        """A thread beside the engine ended by an exception: so does the process."""
        self._pump.crashed(error)

    def _may_begin(self) -> bool:
        return self._drained is None and self._note() is None

    def _ordered(self, drained: str | None) -> None:
        """An operator has drained this worker, with a reason, or hasn't."""
        if drained != self._drained:
            log.info("worker.drained" if drained else "worker.undrained", worker=self.owner, reason=drained)
        self._drained = drained

    def _register(self, session: Session) -> None:
        worker_queries.register(session, self.owner, self.digest, self._place())
        if self.swap_began_s is not None:
            worker_queries.note_swap(session, self.digest, round(1000 * (monotonic_s() - self.swap_began_s)))
        if self._formats is not None:
            weights, kv = self._formats
            worker_queries.note_formats(
                session, self.digest, weight_format=weights, kv_format=kv, quality=self._quality
            )

    def admit(self) -> None:
        """Use a ticket: blocks until there is room for a unit, then claims one."""
        self._intake.admit()

    def signalled(self) -> None:
        """Called in the signal handler: from now on nothing is claimed; a second call shortens the drain."""
        self._signals += 1
        self._units.is_draining = self._calls.is_draining = True

    def drain(self) -> None:
        """End in order, within the grace. Later calls do nothing."""
        if self._is_drained:
            return
        self._is_drained = True
        failpoints.reach("worker.draining")
        log.info("worker.draining", worker=self.owner, units=self._units.num_live())
        end_s = monotonic_s() + self._settings.term_grace_s
        margin_s = min(_MOST_MARGIN_S, self._settings.term_grace_s / 3)
        self._calls.is_draining = True
        if self.switcher is not None:
            self.switcher.stop(_LAST_WRITE_S)
        self._intake.close()
        if self.failure is None:  # a dead engine runs nothing on
            self._units.drain()
            self._wait_for_units(end_s - margin_s, unless=lambda: self._signals > 1 or self.failure is not None)
        has_failed = self.failure is not None
        if has_failed:
            self._tell_of_failure()
        # from here on no token is generated: what is saved now is all there is. Nobody waits for an engine that hangs.
        self._pump.stop(_LOOK_S if has_failed else margin_s / 4)
        self._units.stop_all(crashed=self._has_crashed)
        self._calls.stop_all()
        self._lines.stop(_LAST_WRITE_S)
        self._wait_for_units(end_s - margin_s / 4)
        self._writer.stop(_LAST_WRITE_S)
        self._leases.stop(_LAST_WRITE_S)
        self._ended.set()
        self._retire()
        self._dispatcher.close()
        self._engine.close()
        self._lease_db.dispose()
        self._db.dispose()

    def _tell_of_failure(self) -> None:
        """Settle what the failure says of the units: nothing of a suspect that still waited for calls to end. For the
        others the last heartbeat tells how many calls were open (batchsvc/batches/poison.py)."""
        self._has_crashed = not (self._units.holds_suspect() and self._calls.num_running())
        self._open_at_failure = self._calls.num_open()
        if not self._open_at_failure:
            return
        try:
            self._db.run(
                lambda session: worker_queries.beat(
                    session, self.owner, self.digest, is_draining=True, stats={"calls": self._open_at_failure}
                )
            )
        except SQLAlchemyError as error:  # then it counts as if there had been none
            log.warning("worker.calls_not_told", error=type(error).__name__)

    def _retire(self) -> None:
        """Give back what is left, and end as a worker. Like a killed process, one whose engine died marks its units."""
        if self.failure is not None and self._open_at_failure is None:  # it failed since
            self._tell_of_failure()

        def retire(session: Session) -> int:
            left = unit_queries.release_all(session, self.owner, crashed=self._has_crashed)
            if self.must_end():
                worker_queries.retire(session, self.owner)
            return left

        try:
            left = self._db.run(retire)
        except DBAPIError as error:
            log.warning("worker.not_retired", error=type(error).__name__)
        else:
            log.info("worker.retired", worker=self.owner, units_left=left)

    def _watch(self) -> None:
        seen_s = monotonic_s()
        while not self._ended.wait(_GUARD_S):
            now_s = monotonic_s()
            self._leases.fence()
            self._pump.look_for_a_hang(now_s - seen_s, self._settings.hung_s)
            seen_s = now_s

    def _wait_for_units(self, until_s: float, unless: Callable[[], bool] = lambda: False) -> None:
        while self._num_unfinished() and monotonic_s() < until_s and not unless():
            time.sleep(_LOOK_S)

    def _num_unfinished(self) -> int:
        return self._units.num_live() + self._writer.num_open() + self._calls.num_open()

    def _unit_ended(self, unit: ClaimedUnit, is_done: bool) -> None:
        if not is_done:
            self._dispatcher.ticket(self.digest)
        try:
            with self._db.reading() as session:
                is_due = finalize_queries.is_due(session, unit.batch_id)
        except DBAPIError as error:  # the reaper asks again
            log.warning("batch.not_asked", batch=unit.batch_id, error=type(error).__name__)
            return
        if is_due:
            self._dispatcher.finalize(unit.batch_id)

    def _busy_share(self) -> float:
        """Of the time since the last heartbeat."""
        (busy_s, then_s), self._seen_busy = self._seen_busy, (self._pump.busy_s, monotonic_s())
        return round(min((self._seen_busy[0] - busy_s) / max(self._seen_busy[1] - then_s, 1e-3), 1.0), 4)

    def _beat(self) -> Beat:
        return Beat(self._units.is_draining, {**self.shown(), "busy_share": self._busy_share()})

    def trouble(self) -> str | None:
        """Why it claims nothing, in a sentence; None: it serves."""
        if self.failure is not None:
            return self.failure
        if self._units.is_draining:
            return "The worker drains and ends."
        if self._drained is None:
            return self._note()
        name = self._place().name or self.owner
        return f"The worker {name} is drained ({self._drained}): `batchsvc workers undrain {name}` ends that."

    def shown(self) -> dict[str, Any]:
        """What it says of itself: plain data."""
        stats = self._engine.stats()
        return {
            **{name: getattr(stats, name) for name in stats.__dataclass_fields__},
            "units": self._units.num_live(),
            "calls": self._calls.num_open() if self._open_at_failure is None else self._open_at_failure,
            "busy_ms": round(1000 * self._pump.busy_s),
            "buffered_bytes": self._writer.num_bytes,
            "ended": self._writer.ended(),
            "leases_lost": self._leases.lost(),
            **self._engine.signals(),
            "note": self._note(),  # tenants read it: no word of an operator's
            "problems": self._problems(),
            "clock_ms": now_ms(),
        }


def step_of(start: Callable[[], None], stop: Callable[[], None]) -> type:
    """A bootstep of Celery's worker that starts and stops something with the worker, after its pool.

    It also has Celery's loop look at its queue often: with prefetch disabled, nothing wakes the loop when a thread
    has finished its task, and the next message would wait for a second.
    """

    def begin(_step: Any, _worker: Any) -> None:
        start()

    def end(_step: Any, _worker: Any) -> None:
        stop()

    def look_often(_step: Any, _worker: Any, hub: Any) -> None:
        hub.call_repeatedly(_LOOP_S, lambda: None)

    members = {
        "requires": ("celery.worker.components:Pool",),
        "start": begin,
        "stop": end,
        "terminate": end,
        "register_with_event_loop": look_often,
    }
    return type("RunStep", (bootsteps.StartStopStep,), members)


def _nothing() -> None:
    """An engine that waits for nobody has nothing to say of it."""


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # Celery then stops in order, and `drain` gives the units back
