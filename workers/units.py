"""The first source of the pump: units, claimed by ticket or by polling, several at once from several batches.

A ticket waits in `admit` until there is room for another unit, then claims in its own thread and returns, so Redis
keeps holding what nobody has room for. Claims without a ticket have a thread of their own: they wait for store and
database, which the pump must not. A claimed unit is *live* until its last word is written: all lines finished, or given
back (cancelled batch, drain), or lost (someone else's epoch). Nothing here is the truth: a unit that this process
forgets comes back by its lease.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import failpoints
from batchsvc.batches import budget_queries, repair_queries, unit_file, unit_queries
from batchsvc.batches.budget_queries import Verdict
from batchsvc.batches.damage import DamagedObjectError, verified
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.unit_queries import Claim, ClaimedUnit
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database, database_now_ms
from batchsvc.errors import NotFoundError, ServiceError, UnavailableError
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from engine.errors import RequestError
from engine.request import Completion, Expectation, Request
from workers import objects
from workers.allowance import Allowance, Ask
from workers.breaker import Breaker, Way
from workers.thread import WorkThread
from workers.translate import (
    FinishedLine,
    Generated,
    OpenRow,
    may_run_again,
    open_rows,
    to_errors,
    to_expectation,
    to_lines,
    to_over_budget,
    to_request,
    to_unfinished,
)

_LOOK_S = 0.1
_ASK_S = 0.5  # how often more money is asked for
_CLAIM_END_S = 2.0  # how long a drain waits for a claim under way

log = structlog.get_logger(__name__)


class LeasesOf(Protocol):
    """What a source asks of its lease keeper."""

    def hold(self, unit_id: str, epoch: int, since_s: float) -> None: ...
    def forget(self, claims: Iterable[Claim]) -> None: ...
    def is_held(self, claim: Claim) -> bool: ...


class PartsOf(Protocol):
    """What a source asks of its writer."""

    def has_work(self) -> bool: ...
    def begin(self, unit: ClaimedUnit) -> None: ...
    def add(self, unit: ClaimedUnit, lines: list[FinishedLine]) -> None: ...
    def fail(self, unit: ClaimedUnit, lines: list[FinishedLine]) -> None: ...
    def end(
        self,
        unit: ClaimedUnit,
        *,
        release: bool,
        crashed: bool = False,
        delay_s: float = 0,
        unfinished: Sequence[Unfinished] = (),
    ) -> None: ...
    def drop(self, claim: Claim) -> None: ...


class EngineOf(Protocol):
    """What a source asks of the pump, from any thread."""

    def wake(self) -> None: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...
    def withdraw(self, request_ids: Iterable[str]) -> None: ...
    def generated(self, request_id: str) -> Generated | None: ...
    def has_started(self, request_id: str) -> bool: ...
    def crashed(self, error: Exception) -> None: ...


@dataclass(slots=True, eq=False)
class _LiveUnit:
    unit: ClaimedUnit
    open: dict[str, OpenRow] = field(default_factory=dict)  # rows without a result, by request id
    failed: set[str] = field(default_factory=set)  # those of them that the engine failed
    allowance: Allowance | None = None  # what they may cost; None: whatever they cost
    is_ending: bool = False


class UnitSource:
    """Claims units of one model for one worker and carries their lines between engine and writer.

    `is_night` says whether batches that wait for the off-peak hours may be claimed; `on_end` gets a unit whose last
    word is written, and whether it is done.
    """

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        *,
        digest: str,
        owner: str,
        lease_s: float,
        poll_s: float,
        breaker: Breaker,
        engine: EngineOf,
        is_night: Callable[[], bool],
        on_end: Callable[[ClaimedUnit, bool], None],
    ) -> None:
        self._db = db
        self._store = store
        self._digest = digest
        self._owner = owner
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._breaker = breaker
        self._engine = engine
        self._is_night = is_night
        self._on_end = on_end
        self._leases: LeasesOf
        self._parts: PartsOf
        self._changed = threading.Condition()
        self._claiming = threading.Lock()
        self._live: dict[str, _LiveUnit] = {}
        self._of_request: dict[str, _LiveUnit] = {}
        self._news: list[tuple[str, Expectation | None]] = []  # announcements that the engine doesn't know yet
        self._backlog: deque[OpenRow] = deque()  # rows of live units that the engine doesn't have yet
        self._room = 0  # requests that fit the engine's waiting set beyond the backlog
        self._next_poll_s = monotonic_s() + poll_s
        self._next_ask_s = 0.0
        self._thread = WorkThread("claim", self._claim_without_tickets, engine.crashed)
        self.is_draining = False  # set in a signal handler too, so a plain attribute and no lock

    def connect(self, leases: LeasesOf, parts: PartsOf) -> None:
        """The three know each other; before the first claim."""
        self._leases, self._parts = leases, parts

    def start(self) -> None:
        """Begin to claim without tickets."""
        self._thread.start()

    # ---- tickets

    def admit(self) -> bool:
        """Wait for room, then use a ticket: claim one unit. False: draining, or there was nothing to claim."""
        while not self.is_draining:
            with self._claiming:
                if self._has_room():
                    self._next_poll_s = monotonic_s() + self._poll_s
                    return self._claim()
            with self._changed:
                self._changed.wait(_LOOK_S)
        return False

    def num_live(self) -> int:
        with self._changed:
            return len(self._live)

    # ---- the pump's side

    def announce(self) -> list[tuple[str, Expectation | None]]:
        """What later units need of the prefixes of a live one; taken back when that one's last word is written."""
        with self._changed:
            news, self._news = self._news, []
        return news

    def take(self, room: int) -> list[Request]:
        with self._changed:
            parked = sum(len(live.allowance.parked) for live in self._live.values() if live.allowance)
            self._room = room - len(self._backlog) - parked
            self._changed.notify_all()
        requests: list[Request] = []
        while len(requests) < room and not self._breaker.is_open and not self.is_draining:
            with self._changed:
                if not self._backlog:
                    break
                row = self._backlog.popleft()
                live = self._of_request.get(row.request_id)
                if live is None or (live.allowance and not live.allowance.admit(row)):
                    continue
            try:
                requests.append(to_request(live.unit, row))
            except RequestError as error:
                self.refuse(row.request_id, error)
        return requests

    def finish(self, completion: Completion) -> None:
        with self._changed:
            live = self._of_request.get(completion.request_id)
            row = live.open[completion.request_id] if live else None
        if live and row and may_run_again(completion):
            self._failed(live, row, to_lines(live.unit, row, completion))
        elif live and row:
            self._finished(live, row, to_lines(live.unit, row, completion))

    def refuse(self, request_id: str, error: RequestError) -> None:
        with self._changed:
            live = self._of_request.get(request_id)
            row = live.open[request_id] if live else None
        if live and row:
            lines = to_errors(live.unit, row, code=error.code, message=str(error), status=400, param=error.param)
            self._finished(live, row, lines)

    def _finished(self, live: _LiveUnit, row: OpenRow, lines: list[FinishedLine]) -> None:
        with self._changed:
            if self._of_request.pop(row.request_id, None) is None:
                return  # stopped or lost meanwhile
            if lines:
                del live.open[row.request_id]
                self._parts.add(live.unit, lines)
            self._settle(live, row, sum(finished.line.cost_nanos for finished in lines))
            self._end_if_over(live)

    def _failed(self, live: _LiveUnit, row: OpenRow, lines: list[FinishedLine]) -> None:
        with self._changed:
            if self._of_request.pop(row.request_id, None) is None:
                return  # stopped or lost meanwhile
            live.failed.add(row.request_id)
            self._parts.fail(live.unit, lines)
            self._settle(live, row, 0)
            self._end_if_over(live)

    def _settle(self, live: _LiveUnit, row: OpenRow, cost_nanos: int) -> None:
        if live.allowance:
            live.allowance.ended(row.request_id, cost_nanos)
            self._backlog.extend(live.allowance.unpark())

    def _end_if_over(self, live: _LiveUnit) -> None:
        is_over = not any(request_id in self._of_request for request_id in live.open)
        if is_over and not live.is_ending:
            live.is_ending = True
            self._parts.end(live.unit, release=bool(live.open), unfinished=self._unfinished_of(live))

    # ---- from lease keeper, writer and drain

    def unfinished(self, unit_id: str) -> list[Unfinished]:
        """What runs of a unit at this moment, for whoever would have to go on with it."""
        with self._changed:
            live = self._live.get(unit_id)
            return self._unfinished_of(live) if live else []

    def _unfinished_of(self, live: _LiveUnit) -> list[Unfinished]:
        rows = [row for request_id, row in live.open.items() if request_id not in live.failed]
        known = (to_unfinished(row, self._engine.generated(row.request_id)) for row in rows)
        return [sequence for sequence in known if sequence is not None]

    def lost(self, claims: Iterable[Claim]) -> None:
        """These are someone else's: stop them, write nothing more for them."""
        for claim in claims:
            self._forget(claim)
            self._parts.drop(claim)

    def stop(self, unit_ids: Iterable[str], *, crashed: bool = False) -> None:
        """Give these back: abort what runs, keep what is finished and what was generated."""
        for unit_id in unit_ids:
            with self._changed:
                live = self._live.get(unit_id)
                if live is None or live.is_ending:
                    continue
                live.is_ending = True
                requests = self._detach(live)
                unfinished = self._unfinished_of(live)
                self._parts.end(live.unit, release=True, crashed=crashed, unfinished=unfinished)
            self._engine.abort(requests)

    def ended(self, unit: ClaimedUnit, is_done: bool) -> None:
        """A unit's last word is written."""
        log.info("unit.ended", unit=unit.id, batch=unit.batch_id, done=is_done)
        self._forget(unit.claim)
        self._leases.forget([unit.claim])
        self._on_end(unit, is_done)
        self._engine.wake()

    def close(self) -> None:
        """Claim nothing more. Waits a while for a claim under way; later its unit is given back as soon as it comes."""
        self.is_draining = True
        with self._changed:
            self._changed.notify_all()
        if self._claiming.acquire(timeout=_CLAIM_END_S):
            self._claiming.release()

    def drain(self) -> None:
        """Run on only the requests that have begun; units without any are given back now."""
        with self._changed:
            self._backlog.clear()
            waiting = [request_id for request_id in self._of_request if not self._engine.has_started(request_id)]
            for request_id in waiting:
                del self._of_request[request_id]
        self._engine.withdraw(waiting)
        with self._changed:
            idle = [unit_id for unit_id, live in self._live.items() if not live.open.keys() & self._of_request.keys()]
        self.stop(idle)

    def stop_all(self, *, crashed: bool = False) -> None:
        """Give every live unit back."""
        with self._changed:
            unit_ids = list(self._live)
        self.stop(unit_ids, crashed=crashed)

    def _forget(self, claim: Claim) -> None:
        with self._changed:
            live = self._live.get(claim.unit_id)
            if live is None or live.unit.epoch != claim.epoch:
                return
            del self._live[claim.unit_id]
            requests = self._detach(live)
            self._news.append((claim.unit_id, None))
        self._engine.abort(requests)

    def _detach(self, live: _LiveUnit) -> list[str]:
        requests = [request_id for request_id in live.open if self._of_request.pop(request_id, None) is not None]
        self._backlog = deque(row for row in self._backlog if row.request_id in self._of_request)
        return requests

    # ---- claiming

    def _has_room(self) -> bool:
        return self._room > 0 and not self.is_draining and not self._breaker.is_open

    def _claim_without_tickets(self) -> None:
        while not self.is_draining:
            with self._changed:
                self._changed.wait(_LOOK_S)
            self._probe("reads")
            if not self._parts.has_work():  # else the writer finds out by its own work
                self._probe("writes")
            self._ask_for_money()
            self._poll()

    def _ask_for_money(self) -> None:
        """For units that could run more lines if they had more to spend."""
        if monotonic_s() < self._next_ask_s or self._breaker.is_open:
            return
        self._next_ask_s = monotonic_s() + _ASK_S
        with self._changed:
            short = [live for live in self._live.values() if live.allowance and live.allowance.parked]
        for live in short:
            with self._changed:
                assert live.allowance is not None, "only such were chosen"
                ask = live.allowance.ask(sum(request_id in self._of_request for request_id in live.open))
            verdict = self._grant(live, ask)
            with self._changed:
                self._backlog.extend(live.allowance.unpark())
                refused = list(live.allowance.parked.values()) if verdict is Verdict.OVER else []
            for row in refused:
                self._finished(live, row, to_over_budget(live.unit, row, live.allowance.most_nanos(row)))
            if verdict is Verdict.WAIT:
                self.stop([live.unit.id])
            self._engine.wake()

    def _grant(self, live: _LiveUnit, ask: Ask) -> Verdict | None:
        """Ask for money, and note what was granted. None: not known, or the unit is lost."""
        try:
            grant = self._db.run(
                lambda session: budget_queries.grant(session, live.unit.id, live.unit.epoch, **ask._asdict())
            )
        except DBAPIError as error:
            wait_s = self._breaker.failed("reads")
            log.warning("unit.not_granted", unit=live.unit.id, error=type(error).__name__, again_in_s=wait_s)
            return None
        if grant is None or live.allowance is None:
            return None
        with self._changed:
            live.allowance.granted_nanos = grant.granted_nanos
        return grant.verdict

    def _probe(self, way: Way) -> None:
        """See whether what failed works again, without taking a unit for it."""
        if not self._breaker.is_failing(way) or not self._breaker.may_try(way):
            return
        try:
            with self._db.reading() as session:
                database_now_ms(session)
            self._store.put(keys.PROBE, b"")
            self._store.head(keys.PROBE)
        except (ServiceError, DBAPIError) as error:
            wait_s = self._breaker.failed(way)
            log.warning("store.still_away", way=way, error=type(error).__name__, again_in_s=wait_s)
        else:
            self._breaker.worked(way)

    def _poll(self) -> None:
        """Claims without a ticket: tickets may be lost, and so may all of Redis.

        It begins `poll_s` after the last ticket, and goes on as there is room until a claim finds nothing.
        """
        if monotonic_s() < self._next_poll_s or not self._has_room() or not self._claiming.acquire(blocking=False):
            return
        try:
            while self._has_room():
                if not self._claim():
                    wait_s = self._poll_s * random.uniform(0.75, 1.25)  # noqa: S311  spreads the load
                    self._next_poll_s = monotonic_s() + wait_s
                    break
        finally:
            self._claiming.release()

    def _claim(self) -> bool:
        """Claim the best-ranked unit and load it; the caller holds the claiming lock."""
        began, is_night = monotonic_s(), self._is_night()
        try:
            claimed = self._db.run(
                lambda session: unit_queries.claim(
                    session, self._digest, self._owner, self._lease_s, 1, is_night=is_night
                )
            )
        except DBAPIError as error:
            wait_s = self._breaker.failed("reads")
            log.warning("unit.not_claimed", error=type(error).__name__, again_in_s=wait_s)
            return False
        for unit in claimed:
            failpoints.reach("unit.claimed")
            self._leases.hold(unit.id, unit.epoch, began)
            if not self._load(unit):
                return False
        return bool(claimed)

    def _load(self, unit: ClaimedUnit) -> bool:
        """Start a claimed unit, or give it back."""
        if self.is_draining:
            self._parts.end(unit, release=True)
            return False
        try:
            self._start(unit)
        except UnavailableError as error:
            wait_s = self._breaker.failed("reads")
            log.warning("unit.not_read", unit=unit.id, error=type(error).__name__, again_in_s=wait_s)
            self._parts.end(unit, release=True)
            return False
        except DamagedObjectError as error:
            log.warning("unit.damaged", unit=unit.id, batch=unit.batch_id, key=error.key, reason=error.reason)
            self._leases.forget([unit.claim])
            try:
                self._db.run(lambda session: repair_queries.return_unit(session, unit.id, unit.epoch))
            except DBAPIError as failed:  # whoever claims it next finds the same
                log.warning("unit.not_returned", unit=unit.id, error=type(failed).__name__)
            return False
        except (ServiceError, ValueError, OSError) as error:
            log.warning("unit.not_read", unit=unit.id, key=unit.s3_key, error=type(error).__name__)
            self._parts.end(unit, release=True, delay_s=self._lease_s)
            return False
        return True

    def _saved(self, unit: ClaimedUnit) -> dict[int, Unfinished]:
        try:
            return objects.load_sequences(self._store, unit)
        except (NotFoundError, ValueError) as error:  # its lines begin anew
            log.warning("sequences.not_read", unit=unit.id, key=unit.resume_key, error=type(error).__name__)
            return {}

    def _start(self, unit: ClaimedUnit) -> None:
        file = unit_file.read(verified(self._store.get, unit.s3_key, unit.sha256))
        rows, expectation = list(open_rows(unit, file, self._saved(unit))), to_expectation(unit, file)
        resumed = sum(row.resumed is not None for row in rows)
        log.info(
            "unit.claimed", unit=unit.id, epoch=unit.epoch, batch=unit.batch_id, requests=len(rows), resumed=resumed
        )
        live = _LiveUnit(unit, {row.request_id: row for row in rows})
        if unit.is_metered:
            live.allowance = Allowance(unit, rows)
            self._grant(live, live.allowance.ask_for_all())
        if (earlier := self._live.get(unit.id)) is not None:  # lost, freed and claimed again before anybody noticed
            self.lost([earlier.unit.claim])
        with self._changed:
            if not self._leases.is_held(unit.claim):  # reading took longer than the lease, or the unit was taken away
                self._parts.drop(unit.claim)
                return
            self._parts.begin(unit)
            self._live[unit.id] = live
            if expectation is not None:
                self._news.append((unit.id, expectation))
            self._of_request.update(dict.fromkeys(live.open, live))
            self._backlog.extend(rows)
            self._room -= len(rows)
        self._engine.wake()
