"""The same fault again and again within one run: a hundred kills at random moments, Redis wiped twenty times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
from sqlalchemy import select

from batchsvc.batches.tables import Unit
from tests.faults import witness
from tests.faults.cluster import FAULT_PERIODS, Cluster, Job
from tests.faults.judge import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Judge = Callable[..., Verdict]
KILLS, WIPES = 100, 20
SLOWLY = {"BATCHSVC_FAKE_TOKENS_PER_S": 300}
RESUMES_S = float(FAULT_PERIODS["BATCHSVC_LEASE_S"]) + 2 * float(FAULT_PERIODS["BATCHSVC_REAPER_S"])
BUSY = 5  # how much slower than promised a busy machine may be


class Resumptions:
    """How long the units of killed workers waited until they were free, and until another worker had them."""

    def __init__(self, cluster: Cluster) -> None:
        self.freed_s: list[float] = []
        self.resumed_s: list[float] = []
        self._cluster = cluster
        self._waiting: dict[str, tuple[int, float, bool]] = {}

    def killed(self, held: list[Unit]) -> None:
        self._waiting |= {unit.id: (unit.epoch, time.monotonic(), False) for unit in held}

    def look(self) -> bool:
        """Note what has happened since; whether nothing waits any more."""
        with self._cluster.db.reading() as session:
            units = session.scalars(select(Unit).where(Unit.id.in_(self._waiting))).all()
        for unit in units:
            epoch, since_s, was_free = self._waiting[unit.id]
            took_s = time.monotonic() - since_s
            is_on = unit.epoch > epoch or unit.state in ("done", "sealed")
            if not was_free and (is_on or unit.state != "leased"):
                self.freed_s.append(took_s)
                self._waiting[unit.id] = (epoch, since_s, True)
            if is_on:
                self.resumed_s.append(took_s)
                del self._waiting[unit.id]
        return not self._waiting


def test_a_hundred_kills_at_random_moments(cluster: Cluster, judge: Judge) -> None:
    """0 lost, 0 twice, 0 billed twice (the judge); what the dead held is free within lease + 2 reaper periods."""
    cluster.start("control")
    for _ in range(2):
        cluster.start("engine", **SLOWLY)
    resumptions = Resumptions(cluster)
    for number in range(KILLS):
        # always work for all: whoever kills the one holder of the last unit again and again looks like a poison line
        while sum(not _ended(cluster, job) for job in cluster.jobs) < 2:
            cluster.submit(300)
        if number % 2 == 0:  # else the next one dies while the work of the last one still waits
            cluster.until(resumptions.look, "what the dead held goes on")
        time.sleep(cluster.rng.uniform(0, 1))
        victim = cluster.rng.choice(cluster.alive("engine"))
        victim.stop()  # so that what it holds is what it dies with
        held = cluster.holds(victim)
        victim.kill()
        resumptions.killed(held)
        cluster.start("engine", **SLOWLY)
    cluster.until(resumptions.look, "all units of the dead go on")
    for each in cluster.jobs:
        cluster.wait(each, "completed", timeout_s=120)
    verdicts = [judge(each) for each in cluster.jobs]
    delivered = sum(line["response"]["body"]["usage"]["completion_tokens"] for v in verdicts for line in v.output)
    generated = witness.read(cluster.witness).num_tokens()
    print(
        f"{KILLS} kills, {len(verdicts)} batches, {len(resumptions.resumed_s)} units interrupted; "
        f"free after {statistics.median(resumptions.freed_s):.1f} s, at most {max(resumptions.freed_s):.1f} s; "
        f"resumed after {statistics.median(resumptions.resumed_s):.1f} s, at most {max(resumptions.resumed_s):.1f} s; "
        f"promised {RESUMES_S:.1f} s; tokens generated / delivered {generated / max(delivered, 1):.2f}"
    )
    assert sum(len(verdict.output) for verdict in verdicts) == 300 * len(verdicts)
    assert statistics.median(resumptions.freed_s) <= RESUMES_S
    assert max(resumptions.freed_s) <= BUSY * RESUMES_S


def test_redis_wiped_twenty_times(cluster: Cluster, judge: Judge) -> None:
    """Tickets alone feed the workers here, so each wipe takes all that waits; work goes on within 10 s."""
    cluster.start("control")
    for _ in range(2):
        cluster.start("engine", BATCHSVC_POLL_S=600, **SLOWLY)
    job, waits = cluster.submit(600), []
    cluster.until(lambda: cluster.num_done(job), "the first part")
    for _ in range(WIPES):
        cluster.wipe_redis()
        before, began_s = cluster.num_done(job), time.monotonic()
        cluster.until(lambda before=before: cluster.num_done(job) > before or _ended(cluster, job), "it goes on")
        waits.append(time.monotonic() - began_s)
        time.sleep(cluster.rng.uniform(0.0, 0.3))
    cluster.wait(job, "completed")
    print(f"{WIPES} wipes: lines count again after {statistics.median(waits):.1f} s, at most {max(waits):.1f} s")
    assert max(waits) <= 10
    assert judge(job).needless == 0


def _ended(cluster: Cluster, job: Job) -> bool:
    return cluster.batch(job).ended_ms is not None
