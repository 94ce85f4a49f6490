"""Brings units in: claims one by ticket or by polling, reads its file, and hands its rows to the source.

A ticket waits in `admit` until there is room for another unit, then claims in its own thread and returns, so Redis
keeps holding what nobody has room for. Claims without a ticket have a thread of their own: they wait for store and
database, which the pump must not. The same thread finds out whether what has failed works again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import failpoints
from batchsvc.batches import repair_queries, unit_file, unit_queries
from batchsvc.batches.damage import DamagedObjectError, verified
from batchsvc.batches.resume_file import Unfinished
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database, database_now_ms
from batchsvc.errors import NotFoundError, ServiceError, UnavailableError
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from batchsvc.threads import WorkThread
from workers import objects
from workers.breaker import Breaker, Way
from workers.seams import LeasesOf, PartsOf
from workers.translate import open_rows, to_expectation
from workers.units import UnitSource

_LOOK_S = 0.1
_CLAIM_END_S = 2.0  # how long a drain waits for a claim under way

log = structlog.get_logger(__name__)


class Intake:
    """Claims units of one model for one worker. `is_night` says whether batches that wait for the off-peak hours may
    be claimed.
    """

    def __init__(
        self,
        db: Database,
        store: ObjectStore,
        source: UnitSource,
        leases: LeasesOf,
        parts: PartsOf,
        *,
        digest: str,
        owner: str,
        lease_s: float,
        poll_s: float,
        breaker: Breaker,
        is_night: Callable[[], bool],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._db = db
        self._store = store
        self._source = source
        self._leases = leases
        self._parts = parts
        self._digest = digest
        self._owner = owner
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._breaker = breaker
        self._is_night = is_night
        self._claiming = threading.Lock()
        self._next_poll_s = monotonic_s() + poll_s
        self._thread = WorkThread("claim", self._claim_without_tickets, on_crash)

    def start(self) -> None:
        """Begin to claim without tickets."""
        self._thread.start()

    def admit(self) -> bool:
        """Wait for room, then use a ticket: claim one unit. False: draining, or there was nothing to claim."""
        while not self._source.is_draining:
            with self._claiming:
                if self._source.has_room():
                    self._next_poll_s = monotonic_s() + self._poll_s
                    return self._claim()
            self._source.wait(_LOOK_S)
        return False

    def close(self) -> None:
        """Claim nothing more. Waits a while for a claim under way; later its unit is given back as soon as it comes."""
        self._source.close()
        if self._claiming.acquire(timeout=_CLAIM_END_S):
            self._claiming.release()

    def _claim_without_tickets(self) -> None:
        while not self._source.is_draining:
            self._source.wait(_LOOK_S)
            self._probe("reads")
            if not self._parts.has_work():  # else the writer finds out by its own work
                self._probe("writes")
            self._source.ask_for_money()
            self._poll()

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
        if (
            monotonic_s() < self._next_poll_s
            or not self._source.has_room()
            or not self._claiming.acquire(blocking=False)
        ):
            return
        try:
            while self._source.has_room():
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
            try:
                is_loaded = self._load(unit)
            except Exception:  # a defect of ours: its lease runs out, which counts as a crash of it
                self._leases.forget([unit.claim])
                raise
            if not is_loaded:
                return False
        return bool(claimed)

    def _load(self, unit: ClaimedUnit) -> bool:
        """Start a claimed unit, or give it back."""
        if self._source.is_draining:
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
        self._source.begin(unit, rows, expectation)
