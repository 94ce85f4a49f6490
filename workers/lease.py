"""Keeps the leases of one engine worker: renewal by a thread with its own connection, self-fence by monotonic time.

A unit counts as held until 5/6 of its lease after the moment at which the last successful claim or renewal *began*.
Then the worker gives it up on its own, before anyone else can get it, whatever the clocks of other machines say:
`fence` needs nothing but this process's own time, and is called by a thread that never waits. When the database is back
sooner than the reaper, units given up like that are given back to everyone, as no crash of theirs.

Between two renewals the thread only looks which batches were stopped, at least once a second.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import failpoints
from batchsvc.batches import hold_queries, unit_queries, worker_queries
from batchsvc.batches.unit_queries import Claim, RenewedUnit
from batchsvc.batches.worker_queries import Place
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.threads import WorkThread
from workers.breaker import Breaker

_SELF_FENCE = 5 / 6  # of the lease
_LOOK_S = 0.8  # how often stopped batches are looked for, at least

log = structlog.get_logger(__name__)


class Beat(NamedTuple):
    """What a worker says of itself with each heartbeat."""

    is_draining: bool
    stats: dict[str, Any]


def _ignored(_reason: str | None) -> None:
    """Orders of an operator, where nobody follows any."""


class LeaseKeeper:
    """Renews what it was told to hold, and reports what was lost and what has to stop.

    `on_lost` gets claims and `on_stop` unit ids, on the renewal thread; each claim is reported as lost once.
    `on_drain` gets why an operator has drained this worker, or None, again and again. `place` is told with each
    heartbeat.
    """

    def __init__(
        self,
        db: Database,
        owner: str,
        *,
        digest: str,
        lease_s: float,
        renew_s: float,
        beat: Callable[[], Beat],
        breaker: Breaker,
        on_lost: Callable[[list[Claim]], None],
        on_stop: Callable[[list[str]], None],
        on_crash: Callable[[Exception], None],
        on_drain: Callable[[str | None], None] = _ignored,
        place: Callable[[], Place] = Place,
    ) -> None:
        self._db = db
        self._on_drain = on_drain
        self._place = place
        self._owner = owner
        self._digest = digest
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._beat = beat
        self._breaker = breaker
        self._on_lost = on_lost
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._proof_s: dict[str, float] = {}  # unit id -> monotonic time at which the last proof of the lease began
        self._epochs: dict[str, int] = {}
        self._given_up: dict[str, int] = {}  # unit id -> epoch, of units that nobody works on and may be leased to us
        self._lost = {"fenced": 0, "gone": 0}
        self._stopped = threading.Event()
        self._thread = WorkThread("lease", self._run, on_crash)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the renewals; the leases run on until they are released or over."""
        self._stopped.set()
        self._thread.join(timeout_s)

    def hold(self, unit_id: str, epoch: int, since_s: float) -> None:
        """Renew this unit from now on. `since_s`: monotonic time at which its claim began."""
        with self._lock:
            self._proof_s[unit_id], self._epochs[unit_id] = since_s, epoch

    def forget(self, claims: Iterable[Claim]) -> None:
        """Stop caring for claims that are done, released or lost."""
        with self._lock:
            for unit_id, epoch in claims:
                if self._epochs.get(unit_id) == epoch:
                    del self._proof_s[unit_id], self._epochs[unit_id]

    def give_up(self, claims: Iterable[Claim]) -> list[Claim]:
        """Stop caring for claims that nobody works on any more, but that may still be ours: the next renewal frees
        them. Returns those that were held until now."""
        with self._lock:
            ours = [claim for claim in claims if self._epochs.get(claim.unit_id) == claim.epoch]
            self._given_up.update(ours)
        self.forget(ours)
        return ours

    def is_held(self, claim: Claim) -> bool:
        """Whether the unit is certainly ours at this moment: nothing is written for one that isn't."""
        with self._lock:
            proof = self._proof_s.get(claim.unit_id) if self._epochs.get(claim.unit_id) == claim.epoch else None
        return proof is not None and monotonic_s() - proof < self._lease_s * _SELF_FENCE

    def lost(self) -> dict[str, int]:
        """Leases that this worker gave up because it couldn't renew them, and those that others had taken."""
        return dict(self._lost)

    def tick(self) -> None:
        """Renew once, then report what was lost and what has to stop."""
        failpoints.reach("lease.due")
        with self._lock:
            held = dict(self._epochs)
        began = monotonic_s()
        renewed = self._renew()
        if renewed is not None:
            alive = {unit.id for unit in renewed if held.get(unit.id) == unit.epoch}
            with self._lock:
                for unit_id in alive & self._proof_s.keys():
                    self._proof_s[unit_id] = began
            self._report(lost=[Claim(unit_id, epoch) for unit_id, epoch in held.items() if unit_id not in alive])
            self._tell([unit.id for unit in renewed if unit.is_stopping and unit.id in alive])
        self.fence()

    def look(self) -> None:
        """Report what has to stop, and whether an operator has drained this worker."""
        try:
            with self._db.reading() as session:
                stopping = unit_queries.stopping(session, self._owner)
                drained = hold_queries.of_worker(session, self._owner)
        except DBAPIError as error:
            log.warning("lease.not_looked", error=type(error).__name__)
            return
        self._on_drain(drained)
        self._tell(stopping)

    def fence(self) -> None:
        """Give up what can't be renewed any more. Never waits."""
        with self._lock:
            held = dict(self._epochs)
        late = [claim for claim in map(Claim, held.keys(), held.values()) if not self.is_held(claim)]
        if ours := self.give_up(late):
            self._lost["fenced"] += len(ours)
            log.warning("lease.fenced", units=[claim.unit_id for claim in ours])
            self._on_lost(ours)

    def _tell(self, stopping: list[str]) -> None:
        if stopping:
            self._on_stop(stopping)

    def _report(self, lost: list[Claim]) -> None:
        with self._lock:
            lost = [claim for claim in lost if self._epochs.get(claim.unit_id) == claim.epoch]
        if lost:
            self._lost["gone"] += len(lost)
            log.info("lease.gone", units=[claim.unit_id for claim in lost])
            self.forget(lost)
            self._on_lost(lost)

    def _renew(self) -> list[RenewedUnit] | None:
        beat = self._beat()
        with self._lock:
            given_up = dict(self._given_up)
            known = self._epochs.keys() | given_up.keys()
        try:
            with self._db.transaction() as session:
                renewed = unit_queries.renew(session, self._owner, self._lease_s, known)
                drained = worker_queries.beat(
                    session,
                    self._owner,
                    self._digest,
                    is_draining=beat.is_draining,
                    stats=beat.stats,
                    place=self._place(),
                )
                for unit in renewed:
                    if given_up.get(unit.id) == unit.epoch:
                        unit_queries.release(session, unit.id, unit.epoch)
        except DBAPIError as error:
            self._breaker.failed("leases")
            log.warning("lease.not_renewed", error=type(error).__name__)
            return None
        self._breaker.worked("leases")
        self._on_drain(drained)
        with self._lock:
            for unit_id in given_up:
                self._given_up.pop(unit_id, None)
        return renewed

    def _run(self) -> None:
        next_s = monotonic_s() + self._renew_s
        while not self._stopped.wait(max(0.0, min(_LOOK_S, next_s - monotonic_s()))):
            if monotonic_s() < next_s:
                self.look()
                continue
            next_s = monotonic_s() + self._renew_s * random.uniform(0.8, 1.0)  # noqa: S311  spreads the load
            self.tick()
