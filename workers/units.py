"""The first source of the pump: units, claimed by ticket or by polling, several at once from several batches.

A ticket waits in `admit` until there is room for another unit, then claims in its own thread and returns, so Redis
keeps holding what nobody has room for. A claimed unit is *live* until its last word is written: all lines finished,
or given back (cancelled batch, drain), or lost (someone else's epoch). Nothing here is the truth: a unit that this
process forgets comes back by its lease.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import failpoints
from batchsvc.batches import unit_file, unit_queries
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError
from batchsvc.store.s3 import ObjectStore
from engine.errors import RequestError
from engine.request import Completion, Expectation, Request
from workers.translate import FinishedLine, OpenRow, open_rows, to_errors, to_expectation, to_lines, to_request

_LOOK_S = 0.1

log = structlog.get_logger(__name__)


class LeasesOf(Protocol):
    """What a source asks of its lease keeper."""

    def hold(self, unit_id: str, epoch: int, since_s: float) -> None: ...
    def forget(self, unit_ids: Iterable[str]) -> None: ...


class PartsOf(Protocol):
    """What a source asks of its writer."""

    @property
    def is_troubled(self) -> bool: ...
    def add(self, unit: ClaimedUnit, lines: list[FinishedLine]) -> None: ...
    def end(self, unit: ClaimedUnit, *, release: bool, crashed: bool = False, delay_s: float = 0) -> None: ...
    def drop(self, unit_id: str) -> None: ...


@dataclass(slots=True, eq=False)
class _LiveUnit:
    unit: ClaimedUnit
    open: dict[str, OpenRow] = field(default_factory=dict)  # rows without a result, by request id
    is_ending: bool = False


class UnitSource:
    """Claims units of one model for one worker and carries their lines between engine and writer.

    `abort` takes requests out of the engine; `on_end` gets a unit whose last word is written, and whether it is done.
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
        abort: Callable[[Iterable[str]], None],
        wake: Callable[[], None],
        on_end: Callable[[ClaimedUnit, bool], None],
    ) -> None:
        self._db = db
        self._store = store
        self._digest = digest
        self._owner = owner
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._abort = abort
        self._wake = wake
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
        self.is_draining = False  # set in a signal handler too, so a plain attribute and no lock

    def connect(self, leases: LeasesOf, parts: PartsOf) -> None:
        """The three know each other; before the first claim."""
        self._leases, self._parts = leases, parts

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
            self._room = room - len(self._backlog)
            self._changed.notify_all()
        self._poll()
        requests: list[Request] = []
        while len(requests) < room and not self._parts.is_troubled:
            with self._changed:
                if not self._backlog:
                    break
                row = self._backlog.popleft()
                live = self._of_request.get(row.request_id)
            if live is None:
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
        if live and row:
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
            is_over = not any(request_id in self._of_request for request_id in live.open)
            if is_over and not live.is_ending:
                live.is_ending = True
                self._parts.end(live.unit, release=bool(live.open))

    # ---- from lease keeper, writer and drain

    def lost(self, unit_ids: Iterable[str]) -> None:
        """These are someone else's: stop them, write nothing more for them."""
        for unit_id in unit_ids:
            self._forget(unit_id)
            self._parts.drop(unit_id)

    def stop(self, unit_ids: Iterable[str], *, crashed: bool = False) -> None:
        """Give these back: abort what runs, keep what is finished."""
        for unit_id in unit_ids:
            with self._changed:
                live = self._live.get(unit_id)
                if live is None or live.is_ending:
                    continue
                live.is_ending = True
                requests = self._detach(live)
                self._parts.end(live.unit, release=True, crashed=crashed)
            self._abort(requests)

    def ended(self, unit: ClaimedUnit, is_done: bool) -> None:
        """A unit's last word is written."""
        log.info("unit.ended", unit=unit.id, batch=unit.batch_id, done=is_done)
        self._forget(unit.id)
        self._leases.forget([unit.id])
        self._on_end(unit, is_done)
        self._wake()

    def drain(self, keep: Callable[[str], bool], *, crashed: bool = False) -> None:
        """Claim nothing more; run on only the requests that `keep` says have begun."""
        self.is_draining = True
        with self._claiming, self._changed:
            self._changed.notify_all()
            self._backlog.clear()
            waiting = [request_id for request_id in self._of_request if not keep(request_id)]
            for request_id in waiting:
                del self._of_request[request_id]
            idle = [unit_id for unit_id, live in self._live.items() if not live.open.keys() & self._of_request.keys()]
        self._abort(waiting)
        self.stop(idle, crashed=crashed)

    def stop_all(self, *, crashed: bool = False) -> None:
        """Give every live unit back."""
        with self._changed:
            unit_ids = list(self._live)
        self.stop(unit_ids, crashed=crashed)

    def _forget(self, unit_id: str) -> None:
        with self._changed:
            live = self._live.pop(unit_id, None)
            requests = self._detach(live) if live else []
            if live:
                self._news.append((unit_id, None))
        self._abort(requests)

    def _detach(self, live: _LiveUnit) -> list[str]:
        requests = [request_id for request_id in live.open if self._of_request.pop(request_id, None) is not None]
        self._backlog = deque(row for row in self._backlog if row.request_id in self._of_request)
        return requests

    # ---- claiming

    def _has_room(self) -> bool:
        return self._room > 0 and not self.is_draining and not self._parts.is_troubled

    def _poll(self) -> None:
        """Claims without a ticket: tickets may be lost, and so may all of Redis.

        It begins `poll_s` after the last ticket, and goes on as there is room until a claim finds nothing.
        """
        if monotonic_s() < self._next_poll_s or not self._claiming.acquire(blocking=False):
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
        began = monotonic_s()
        try:
            claimed = self._db.run(
                lambda session: unit_queries.claim(session, self._digest, self._owner, self._lease_s, 1)
            )
        except DBAPIError as error:
            log.warning("unit.not_claimed", error=type(error).__name__)
            return False
        for unit in claimed:
            self._leases.hold(unit.id, unit.epoch, began)
            failpoints.reach("unit.claimed")
            try:
                self._start(unit)
            except (ServiceError, ValueError, OSError) as error:
                log.warning("unit.not_read", unit=unit.id, key=unit.s3_key, error=type(error).__name__)
                self._parts.end(unit, release=True, delay_s=self._lease_s)
                return False
        return bool(claimed)

    def _start(self, unit: ClaimedUnit) -> None:
        data = self._store.get(unit.s3_key)
        if hashlib.sha256(data).hexdigest() != unit.sha256:
            raise ValueError(f"The object {unit.s3_key} isn't what was planned.")
        file = unit_file.read(data)
        rows, expectation = list(open_rows(unit, file)), to_expectation(unit, file)
        log.info("unit.claimed", unit=unit.id, epoch=unit.epoch, batch=unit.batch_id, requests=len(rows))
        live = _LiveUnit(unit, {row.request_id: row for row in rows})
        with self._changed:
            self._live[unit.id] = live
            if expectation is not None:
                self._news.append((unit.id, expectation))
            self._of_request.update(dict.fromkeys(live.open, live))
            self._backlog.extend(rows)
            self._room -= len(rows)
        self._wake()
