"""Every fault of the soak as one verb, and the choice among them: by the cluster's own random numbers, so by its seed.

A fault that lasts is undone by the next `calm()`. The processes named in `spared` are paused and cut off like all
others, but never ended: their memory and their handles are what must not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import redis
from sqlalchemy import update

from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.tables import Batch, Unit
from batchsvc.clock import now_ms
from tests.faults.cluster import Cluster, Job, Process, Role
from tests.faults.proxy import POSTGRES_COMMIT, Connection, Direction, FaultProxy, Link, Tripwire
from tests.faults.s3_proxy import Rule, S3Proxy


@dataclass
class Havoc:
    """Makes trouble in a cluster whose services are all behind proxies."""

    cluster: Cluster
    database: FaultProxy
    broker: FaultProxy
    store: S3Proxy
    spared: Sequence[Process]
    stopped: list[Process] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def strike(self) -> None:
        """One fault, chosen at random."""
        fault = self.cluster.rng.choice(self._faults())
        self.done.append(fault.__name__.strip("_"))
        fault()

    def calm(self) -> None:
        """Everything passes again, everybody runs again."""
        for proxy in (self.database, self.broker, self.store):
            proxy.heal()
        for process in self.stopped:
            process.resume()
        self.stopped.clear()
        wanted: dict[Role, int] = {"control": 2, "engine": 3}
        for role, count in wanted.items():
            for _ in range(count - len(self.cluster.alive(role))):
                self.cluster.start(role)

    def _faults(self) -> list[Callable[[], None]]:
        processes = [self._kill_engine, self._kill_control, self._drain_engine, self._pause_somebody]
        work = [self._reap_falsely, self._cancel_some, self._expire_some]
        broker = [self._wipe_redis, self._redis_away, self._redis_silent, self._inject_nonsense]
        store = [self._store_slow_down, self._store_late_errors, self._store_cuts, self._store_away, self._store_slow]
        database = [self._database_cuts, self._database_loses_answers, self._database_away]
        return processes + work + broker + store + database

    # ---- processes

    def _mortal(self, role: Role) -> list[Process]:
        return [process for process in self.cluster.alive(role) if process not in self.spared]

    def _kill_engine(self) -> None:
        for victim in self._mortal("engine")[:1]:
            victim.kill()

    def _kill_control(self) -> None:
        for victim in self._mortal("control")[:1]:
            victim.kill()

    def _drain_engine(self) -> None:
        for victim in self._mortal("engine")[:1]:
            victim.term()

    def _pause_somebody(self) -> None:
        victim = self.cluster.rng.choice(self.cluster.alive("engine") + self.cluster.alive("control"))
        victim.stop()
        self.stopped.append(victim)

    # ---- work

    def _reap_falsely(self) -> None:
        with self.cluster.db.transaction() as session:
            session.execute(update(Unit).where(Unit.state == "leased").values(lease_ms=0))

    def _running(self) -> list[Job]:
        return [job for job in self.cluster.jobs if self.cluster.batch(job).status not in TERMINAL]

    def _cancel_some(self) -> None:
        running = self._running()
        if running:
            try:
                self.cluster.cancel(self.cluster.rng.choice(running))
            except httpx.HTTPError:
                return  # it ended just now, or the API is away

    def _expire_some(self) -> None:
        running = self._running()
        if running:
            job = self.cluster.rng.choice(running)
            with self.cluster.db.transaction() as session:
                soon = now_ms() + 1_000
                mine = (Batch.id == job.id, Batch.status.in_([Status.VALIDATING, Status.IN_PROGRESS]))
                session.execute(update(Batch).where(*mine).values(expires_ms=soon))

    # ---- Redis

    def _wipe_redis(self) -> None:
        self.cluster.wipe_redis()

    def _redis_away(self) -> None:
        self.broker.refuse()

    def _redis_silent(self) -> None:
        self.broker.black_hole()

    def _inject_nonsense(self) -> None:
        with redis.Redis.from_url(self.cluster.services.redis_url) as client:
            client.lpush("batchsvc:ctl", b"\x80\x04nonsense")

    # ---- S3

    def _store_slow_down(self) -> None:
        self.store.rules = [Rule(effect="answer", probability=0.3)]

    def _store_late_errors(self) -> None:
        late = Rule(effect="late_error", methods="PUT POST", probability=0.3, status=500, code="InternalError")
        self.store.rules = [late, Rule(effect="lost_reply", methods="PUT POST", probability=0.1)]

    def _store_cuts(self) -> None:
        self.store.rules = [Rule(effect="truncate", methods="GET", probability=0.3)]

    def _store_away(self) -> None:
        self.store.refuse()

    def _store_slow(self) -> None:
        self.store.set("up", Link(latency_s=0.5, bytes_per_s=20_000))

    # ---- the database

    def _database_cuts(self) -> None:
        def cut(connection: Connection, direction: Direction, _data: bytes) -> None:
            if direction == "up" and self.cluster.rng.random() < 0.02:
                connection.cut(reset=True)

        self.database.tripwire = cut

    def _database_loses_answers(self) -> None:
        self.database.tripwire = Tripwire(POSTGRES_COMMIT, lambda passes: passes % 5 == 0)

    def _database_away(self) -> None:
        self.database.refuse()
