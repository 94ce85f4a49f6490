"""Rows 14 and 15: a worker that stops and wakes up, and one whose lease thread alone stops."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults import witness
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
LEASE_S = 3


def test_row_14_stopped_for_three_leases(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    sleeper = cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=60)
    job = cluster.submit(120)
    cluster.until(lambda: cluster.holds(sleeper) and cluster.num_done(job), "its first part")
    cluster.stop(sleeper)
    held = {unit.id: unit.epoch for unit in cluster.holds(sleeper)}
    assert held
    stopped_s = time.time()
    other = cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=60)
    cluster.until(
        lambda: all(
            unit.epoch > held[unit.id] or unit.state == "done" for unit in cluster.units(job) if unit.id in held
        ),
        "the other worker has its units",
    )
    time.sleep(max(0.0, stopped_s + 3 * LEASE_S - time.time()))
    before = {part.id for part in cluster.parts(job)}
    sleeper.resume()
    woke_s = time.time()
    cluster.wait(job, "completed")
    assert other.is_alive
    late = [part for part in cluster.parts(job) if part.id not in before and part.epoch == held.get(part.unit_id or "")]
    assert not late, "what the sleeper had isn't counted any more"
    waste = [
        run
        for run in witness.read(cluster.witness).runs
        if run.event == "start" and run.epoch == held.get(run.unit_id) and run.at_s > woke_s + LEASE_S
    ]
    assert not waste, "it lets go of what it lost"
    judge(job)


def test_row_15_lease_thread_stopped(cluster: Cluster, judge: Judge) -> None:
    """Nobody renews, but the worker goes on: by its own clock it stops writing before another may have its units.

    There is no reaper meanwhile, so the rows say for ever that the units are its own: only its clock tells it.
    """
    control = cluster.start("control")
    job = cluster.submit(100)
    cluster.wait(job, "in_progress")
    control.kill()
    victim = cluster.start("engine", failpoints="lease.due=hang@10", BATCHSVC_FAKE_TOKENS_PER_S=30)
    cluster.until(lambda: cluster.passed("lease.due"), "the thread hangs")
    held = {unit.id: unit for unit in cluster.holds(victim)}
    assert held

    def named(*events: str) -> set[str]:
        said = "".join(line for line in victim.text().splitlines() if any(event in line for event in events))
        return {unit_id for unit_id in held if unit_id in said}

    cluster.until(lambda: named("unit.ended", "lease.fenced", "unit.lost") == held.keys(), "its units end or are lost")
    given_up = named("lease.fenced", "unit.lost")
    assert given_up, "what it couldn't end in time it gives up by itself"
    held = {unit_id: held[unit_id] for unit_id in given_up}
    time.sleep(LEASE_S)
    after = {unit.id: unit for unit in cluster.holds(victim)}
    assert all((after[name].epoch, after[name].lease_ms) == (held[name].epoch, held[name].lease_ms) for name in held)
    late = [
        part for part in cluster.parts(job) if (was := held.get(part.unit_id or "")) and part.created_ms > was.lease_ms
    ]
    assert not late, "nothing of them counts that came after the end of its lease"
    for role in ("control", "engine"):
        cluster.start(role)
    cluster.wait(job, "completed")
    judge(job)
