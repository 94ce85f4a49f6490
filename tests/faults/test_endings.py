"""Rows 60 to 63: cancel and expiry at every state and every point, their hints lost, and all ends at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchsvc.clock import now_ms
from tests.faults import witness
from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
NO_TOKEN_AFTER_S = 5.0
MOST_MS = 10_000  # from the deadline to the end of up to 2,000 lines

# where the batch is held when it is cancelled: role and failpoint, and how it may end
POINTS = {
    "plan.claimed": ("control", {"cancelled"}),
    "window.stored": ("control", {"cancelled"}),
    "plan.ended": ("control", {"cancelled"}),
    "unit.claimed": ("engine", {"cancelled"}),
    "lines.finished": ("engine", {"cancelled"}),
    "part.stored": ("engine", {"cancelled"}),
    "part.counted": ("engine", {"cancelled"}),
    "unit.written": ("engine", {"cancelled"}),
    "batch.sealed": ("control", {"completed"}),
    "output.stored": ("control", {"completed"}),
    "batch.publishing": ("control", {"completed"}),
}


def assert_sums(cluster: Cluster, job: Job) -> None:
    counts = cluster.get(job)["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"]


@pytest.mark.parametrize("failpoint", POINTS)
def test_row_60_cancelled_at_a_point(cluster: Cluster, judge: Judge, tmp_path: Path, failpoint: str) -> None:
    """The process waits there until the cancel call was answered; then everything goes on."""
    role, ends = POINTS[failpoint]
    gate = tmp_path / "gate"
    held = {role: f"{failpoint}=wait:{gate}@1"}
    control, _ = (cluster.start(name, failpoints=held.get(name, "")) for name in ("control", "engine"))
    job = cluster.submit(60)
    cluster.until(lambda: cluster.passed(failpoint), "the point is reached")
    first = cluster.cancel(job)
    again = cluster.cancel(job)
    assert (first.status_code, again.status_code) == (200, 200), first.text + again.text
    gate.touch()
    assert cluster.wait(job, "cancelled", "completed") in ends
    if failpoint in ("plan.claimed", "window.stored"):
        cluster.until(lambda: "batch.planned" in control.text(), "the planner has noticed")
    assert_sums(cluster, job)
    judge(job)
    late = cluster.cancel(job)
    assert late.status_code == (400 if cluster.batch(job).status == "completed" else 200)


@pytest.mark.quick_faults
@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_60_cancelled_while_busy(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    for _ in range(2):
        cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=200)
    job = cluster.submit(200, max_tokens=20)
    cluster.until(lambda: cluster.num_done(job) > 10, "the first parts")
    assert cluster.cancel(job).json()["status"] == "cancelling"
    asked_s = time.time()
    cluster.wait(job, "cancelled")
    assert witness.read(cluster.witness).last_s() < asked_s + NO_TOKEN_AFTER_S
    assert_sums(cluster, job)
    verdict = judge(job)
    assert verdict.output, "what was finished is delivered, and billed"
    assert verdict.codes == {"batch_cancelled": 200 - len(verdict.output)}


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2])
def test_row_60_cancelled_at_the_last_commit(cluster: Cluster, judge: Judge, delay_s: float) -> None:
    cluster.start("control")
    cluster.start("engine")
    job = cluster.submit(40)
    cluster.until(lambda: cluster.num_done(job) >= 20, "it is nearly done")
    time.sleep(delay_s)
    answer = cluster.cancel(job)
    status = cluster.wait(job, "cancelled", "completed")
    assert answer.status_code == 200 or (answer.status_code, status) == (400, "completed")
    judge(job)


def test_row_61_nobody_hears_of_the_cancel(cluster: Cluster, judge: Judge) -> None:
    """No message of anybody arrives: the worker learns it from its heartbeat, the reaper does the rest."""
    cluster.serve(TEST_HINTS=0)
    cluster.start("control", TEST_HINTS=0)
    cluster.start("engine", TEST_HINTS=0, BATCHSVC_FAKE_TOKENS_PER_S=100)
    job = cluster.submit(100, max_tokens=20)
    cluster.until(lambda: cluster.num_done(job), "the first part")
    cluster.cancel(job)
    asked_s = time.time()
    cluster.wait(job, "cancelled")
    assert witness.read(cluster.witness).last_s() < asked_s + NO_TOKEN_AFTER_S
    judge(job)


@pytest.mark.parametrize("state", ["validating", "in_progress", "finalizing", "zero workers"])
def test_row_62_deadline_passes(cluster: Cluster, judge: Judge, tmp_path: Path, state: str) -> None:
    gate = tmp_path / "gate"
    points = {"validating": f"window.stored=wait:{gate}@1", "finalizing": f"batch.sealed=wait:{gate}@1"}
    cluster.start("control", failpoints=points.get(state, ""))
    if state != "zero workers":
        cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=200 if state == "in_progress" else 5_000)
    job = cluster.submit(80)
    reached: dict[str, Callable[[], object]] = {
        "validating": lambda: cluster.passed("window.stored"),
        "in_progress": lambda: cluster.num_done(job),
        "finalizing": lambda: cluster.passed("batch.sealed"),
        "zero workers": lambda: cluster.batch(job).status == "in_progress",
    }
    cluster.until(reached[state], state)
    deadline_ms = now_ms() - 1
    cluster.change_batch(job, expires_ms=deadline_ms)
    gate.touch()
    assert cluster.wait(job, "expired", "completed") == ("completed" if state == "finalizing" else "expired")
    verdict = judge(job)
    if state == "in_progress":
        assert verdict.output, "what was finished in time is delivered"
        assert witness.read(cluster.witness).last_s() < deadline_ms / 1000 + NO_TOKEN_AFTER_S
        assert (cluster.batch(job).ended_ms or 0) - deadline_ms < MOST_MS
    if state in ("in_progress", "zero workers"):
        assert verdict.codes == {"batch_expired": 80 - len(verdict.output)}


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_63_all_ends_at_once(cluster: Cluster, judge: Judge) -> None:
    """Cancel, expiry and completion race; whichever wins, there is one reason, and it stays."""
    for _ in range(2):
        cluster.start("control")
        cluster.start("engine")
    for _ in range(5):
        job = cluster.submit(20)
        cluster.until(lambda job=job: cluster.num_done(job) or cluster.batch(job).status != "validating", "it runs")
        time.sleep(cluster.rng.uniform(0, 0.6))
        start = threading.Barrier(3)

        def cancel(job: Job = job, start: threading.Barrier = start) -> None:
            start.wait()
            assert cluster.cancel(job).status_code in (200, 400)

        def expire(job: Job = job, start: threading.Barrier = start) -> None:
            start.wait()
            cluster.change_batch(job, unless_ended=True, expires_ms=now_ms() - 1)

        threads = [threading.Thread(target=target) for target in (cancel, expire)]
        for thread in threads:
            thread.start()
        start.wait()
        for thread in threads:
            thread.join()
        cluster.wait(job, "cancelled", "expired", "completed")
    for job in cluster.jobs:
        judge(job)
