"""Rows 9 to 13 and 16: an engine worker killed at each point between a claim and the end of a unit, or robbed of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from sqlalchemy import select

from batchsvc.batches.tables import Unit
from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
LINES = 100


def kill_at(cluster: Cluster, failpoint: str, passes: int) -> tuple[Job, set[int]]:
    """A batch whose worker died at a failpoint, and the lines that counted then."""
    cluster.start("control")
    victim = cluster.start("engine", failpoints=f"{failpoint}=kill@{passes}")
    job = cluster.submit(LINES)
    victim.died()
    assert cluster.passed(failpoint) == 1
    return job, cluster.counted_lines(job)


def finish(cluster: Cluster, judge: Judge, job: Job, counted: set[int]) -> Verdict:
    """Another worker ends the batch; what counted before isn't run again."""
    cluster.start("engine")
    cluster.wait(job, "completed")
    verdict = judge(job)
    assert all(verdict.runs[line] == 1 for line in counted), "a line that counts is never run again"
    assert len(verdict.output) == LINES
    return verdict


@pytest.mark.quick_faults
def test_row_09_killed_after_the_claim(cluster: Cluster, judge: Judge) -> None:
    job, counted = kill_at(cluster, "unit.claimed", 1)
    held = [unit for unit in cluster.units(job) if unit.state == "leased"]
    assert len(held) == 1
    cluster.until(lambda: cluster.units(job)[held[0].no].state == "ready", "the reaper frees it")
    verdict = finish(cluster, judge, job, counted)
    assert verdict.needless == 0, "nothing had begun"


@pytest.mark.quick_faults
def test_row_10_killed_with_finished_lines_in_memory(cluster: Cluster, judge: Judge) -> None:
    job, counted = kill_at(cluster, "lines.finished", 3)
    assert counted
    verdict = finish(cluster, judge, job, counted)
    assert 0 < verdict.needless <= LINES - len(counted)


@pytest.mark.quick_faults
@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_11_killed_before_a_stored_part_counts(cluster: Cluster, judge: Judge) -> None:
    job, counted = kill_at(cluster, "part.stored", 3)
    orphans = cluster.objects(job, "part") - {part.s3_key for part in cluster.parts(job)}
    assert len(orphans) == 1
    verdict = finish(cluster, judge, job, counted)  # the judge wants the orphan collected, and one posting a part
    assert verdict.needless > 0


@pytest.mark.quick_faults
def test_row_12_killed_before_it_knows_that_a_part_counts(cluster: Cluster, judge: Judge) -> None:
    job, counted = kill_at(cluster, "part.counted", 1)
    assert counted
    finish(cluster, judge, job, counted)


def test_row_13_killed_between_the_last_part_and_the_end(cluster: Cluster, judge: Judge) -> None:
    job, counted = kill_at(cluster, "unit.written", 1)
    done = [unit for unit in cluster.units(job) if unit.state == "done"]
    assert done
    finish(cluster, judge, job, counted)
    after = {unit.id: unit for unit in cluster.units(job)}
    assert all((after[unit.id].epoch, after[unit.id].crash_count) == (unit.epoch, 0) for unit in done)


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_16_healthy_workers_robbed_of_their_leases(cluster: Cluster, judge: Judge) -> None:
    """Fifty times the lease of some unit is suddenly over, as by a clock that jumped."""
    cluster.start("control")
    for _ in range(2):
        cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=150)
    jobs, robbed = [cluster.submit(240)], 0
    while robbed < 50:
        job = jobs[-1]
        if cluster.batch(job).status not in ("validating", "in_progress"):
            jobs.append(cluster.submit(240))
            continue
        time.sleep(cluster.rng.uniform(0.02, 0.2))
        with cluster.db.transaction() as session:
            held = session.scalars(select(Unit).where(Unit.batch_id == job.id, Unit.state == "leased")).all()
            if held:
                cluster.rng.choice(held).lease_ms = 0
                robbed += 1
    for job in jobs:
        cluster.wait(job, "completed")
        judge(job)
