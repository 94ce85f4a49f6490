"""The first source of the pump: claimed units, several at once from several batches.

A claimed unit is *live* until its last word is written: all lines finished, or given back (cancelled batch, drain), or
lost (someone else's epoch). Nothing here is the truth: a unit that this process forgets comes back by its lease. How
units come in is for intake.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc.batches import budget_queries
from batchsvc.batches.budget_queries import Verdict
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.unit_queries import Claim, ClaimedUnit
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from engine.errors import RequestError
from engine.request import Completion, Expectation, NewText, Request
from workers.allowance import Allowance, Ask
from workers.breaker import Breaker
from workers.seams import EngineOf, LeasesOf, PartsOf
from workers.translate import (
    FinishedLine,
    OpenRow,
    may_run_again,
    to_errors,
    to_lines,
    to_over_budget,
    to_request,
    to_unfinished,
)

_ASK_S = 0.5  # how often more money is asked for

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _LiveUnit:
    unit: ClaimedUnit
    open: dict[str, OpenRow] = field(default_factory=dict)  # rows without a result, by request id
    failed: set[str] = field(default_factory=set)  # those of them that the engine failed
    allowance: Allowance | None = None  # what they may cost; None: whatever they cost
    is_ending: bool = False


class UnitSource:
    """Carries the lines of live units between engine and writer.

    `on_end` gets a unit whose last word is written, and whether it is done. `fingerprint` says what gives the answers.
    `may_claim` says whether the engine could run another unit at all, `calls_run` whether interactive calls are in it:
    a suspect waits until they have ended.
    """

    def __init__(
        self,
        db: Database,
        *,
        breaker: Breaker,
        engine: EngineOf,
        on_end: Callable[[ClaimedUnit, bool], None],
        fingerprint: str | None = None,
        may_claim: Callable[[], bool] = lambda: True,
        calls_run: Callable[[], bool] = lambda: False,
    ) -> None:
        self._may_claim = may_claim
        self._calls_run = calls_run
        self._db = db
        self._breaker = breaker
        self._engine = engine
        self._on_end = on_end
        self._fingerprint = fingerprint
        self._leases: LeasesOf
        self._parts: PartsOf
        self._changed = threading.Condition()
        self._live: dict[str, _LiveUnit] = {}
        self._of_request: dict[str, _LiveUnit] = {}
        self._news: list[tuple[str, Expectation | None]] = []  # announcements that the engine doesn't know yet
        self._backlog: deque[OpenRow] = deque()  # rows of live units that the engine doesn't have yet
        self._room = 0  # requests that fit the engine's waiting set beyond the backlog
        self._next_ask_s = 0.0
        self.is_draining = False  # set in a signal handler too, so a plain attribute and no lock

    def connect(self, leases: LeasesOf, parts: PartsOf) -> None:
        """The three know each other; before the first claim."""
        self._leases, self._parts = leases, parts

    def begin(self, unit: ClaimedUnit, rows: list[OpenRow], expectation: Expectation | None) -> None:
        """Let the rows of a unit run that was just claimed."""
        live = _LiveUnit(unit, {row.request_id: row for row in rows})
        if unit.is_metered:
            live.allowance = Allowance(unit, rows)
            self._grant(live, live.allowance.ask_for_all())
        if (earlier := self._live.get(unit.id)) is not None:  # lost, freed and claimed again before anybody noticed
            self.lost([earlier.unit.claim])
        with self._changed:
            if not self._leases.is_held(unit.claim):  # reading took longer than the lease, or the unit was taken away
                self._parts.drop(unit.claim)
                self._leases.give_up([unit.claim])
                return
            self._parts.begin(unit)
            self._live[unit.id] = live
            if expectation is not None:
                self._news.append((unit.id, expectation))
            self._of_request.update(dict.fromkeys(live.open, live))
            self._backlog.extend(rows)
            self._room -= sum(row.row.num_answers for row in rows)
        self._engine.wake()

    def has_room(self) -> bool:
        """Whether another unit may be claimed."""
        return self._room > 0 and not self.is_draining and not self._breaker.is_open and self._may_claim()

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be room."""
        with self._changed:
            self._changed.wait(timeout_s)

    def num_live(self) -> int:
        with self._changed:
            return len(self._live)

    def holds_suspect(self) -> bool:
        """Whether one of the live units is suspect: nothing else may run beside it."""
        with self._changed:
            return any(live.unit.is_suspect for live in self._live.values())

    # ---- the pump's side

    def announce(self) -> list[tuple[str, Expectation | None]]:
        """What later units need of the prefixes of a live one; taken back when that one's last word is written."""
        with self._changed:
            news, self._news = self._news, []
        return news

    def take(self, room: int) -> list[Request]:
        with self._changed:
            parked = sum(len(live.allowance.parked) for live in self._live.values() if live.allowance)
            self._room = room - sum(row.row.num_answers for row in self._backlog) - parked
            self._changed.notify_all()
        if self.holds_suspect() and self._calls_run():
            return []
        requests: list[Request] = []
        while sum(request.n for request in requests) < room and not self._breaker.is_open and not self.is_draining:
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
            self._finished(live, row, to_lines(live.unit, row, completion, fingerprint=self._fingerprint))

    def refuse(self, request_id: str, error: RequestError) -> None:
        with self._changed:
            live = self._of_request.get(request_id)
            row = live.open[request_id] if live else None
        if live and row:
            lines = to_errors(live.unit, row, code=error.code, message=str(error), status=400, param=error.param)
            self._finished(live, row, lines)

    def grow(self, request_id: str, texts: list[NewText]) -> None:
        """Nobody waits for the text of a line that isn't finished: none is streamed."""

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
        """Take nothing more on."""
        self.is_draining = True
        with self._changed:
            self._changed.notify_all()

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

    def ask_for_money(self) -> None:
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
                fitting = live.allowance.unpark()
                if ask.need_nanos and verdict is Verdict.FITS and not fitting:
                    fitting = self._cut(live, live.allowance)
                self._backlog.extend(fitting)
                refused = list(live.allowance.parked.values()) if verdict is Verdict.OVER else []
            for row in refused:
                self._finished(live, row, to_over_budget(live.unit, row, live.allowance.most_nanos(row)))
            if verdict is Verdict.WAIT:
                self.stop([live.unit.id])
            self._engine.wake()

    def _cut(self, live: _LiveUnit, allowance: Allowance) -> list[OpenRow]:
        """The lines of a row for which there is money, where there isn't for all of it."""
        cut = allowance.split()
        if cut is None:
            return []
        for row in cut:
            live.open[row.request_id] = row
            self._of_request[row.request_id] = live
        return [cut[0]]

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
