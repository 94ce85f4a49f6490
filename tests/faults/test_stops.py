"""Cancel and expiry hold their word whoever is in the way: a hung worker, a pause, a full batch, nobody at all."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from batchsvc.batches import poison_queries
from batchsvc.clock import now_ms
from tests.faults import witness
from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
MOST_MS = 10_000  # from the cancel call, or the deadline, to the end of up to 2,000 lines
NO_TOKEN_AFTER_S = 5.0


def assert_sums(cluster: Cluster, job: Job) -> None:
    shown = cluster.get(job)
    counts = shown["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == len(job.lines)
    assert shown["progress"] == {"phase": "ended", "share": 1.0}


def test_a_cancel_does_not_wait_for_a_hung_worker(cluster: Cluster, judge: Judge) -> None:
    """Its lease would run for a minute; what it had finished before counts, and what it says later doesn't."""
    cluster.start("control")
    hung = cluster.start("engine", BATCHSVC_LEASE_S=60, BATCHSVC_RENEW_S=5, BATCHSVC_FAKE_TOKENS_PER_S=200)
    job = cluster.submit(200, max_tokens=20)
    cluster.until(lambda: cluster.num_done(job), "the first part")
    cluster.stop(hung)
    assert cluster.cancel(job).json()["status"] == "cancelling"
    cluster.wait(job, "cancelled")
    batch = cluster.batch(job)
    assert (batch.finalizing_ms or 0) - (batch.cancelling_ms or 0) < MOST_MS, "it waited for the lease"
    hung.resume()
    cluster.until(lambda: not cluster.holds(hung), "it has noticed")
    verdict = judge(job)
    assert verdict.codes == {"batch_cancelled": 200 - len(verdict.output)}
    assert_sums(cluster, job)


def test_two_thousand_lines_end_soon_after_a_cancel(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    for _ in range(2):
        cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=2_000, BATCHSVC_UNIT_LINES=256)
    job = cluster.submit(2_000, max_tokens=20)
    cluster.until(lambda: cluster.num_done(job) > 100, "some parts")
    cluster.cancel(job)
    asked_s = time.time()
    cluster.wait(job, "cancelled")
    batch = cluster.batch(job)
    assert (batch.ended_ms or 0) - (batch.cancelling_ms or 0) < MOST_MS
    assert witness.read(cluster.witness).last_s() < asked_s + NO_TOKEN_AFTER_S
    verdict = judge(job)
    assert verdict.output and verdict.codes == {"batch_cancelled": 2_000 - len(verdict.output)}
    assert_sums(cluster, job)


@pytest.mark.parametrize("by", ["operator", "project"])
@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_paused_batch_can_be_cancelled_and_expires(cluster: Cluster, judge: Judge, end: str, by: str) -> None:
    cluster.start("control")
    cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=200)
    job = cluster.submit(100, max_tokens=20)
    cluster.until(lambda: cluster.num_done(job), "the first part")
    if by == "operator":
        cluster.db.run(lambda session: poison_queries.pause(session, job.id, "by the test"))
    else:
        cluster.call("POST", f"/v1/batches/{job.id}/pause").raise_for_status()
    cluster.until(lambda: all(unit.state != "leased" for unit in cluster.units(job)), "the worker gave it back")
    shown = cluster.get(job)
    assert (
        shown["waiting_for"] == ("paused: by the test" if by == "operator" else "paused")
        and shown["estimated_completion_at"] is None
    )
    if end == "cancelled":
        cluster.cancel(job)
    else:
        cluster.change_batch(job, expires_ms=now_ms() - 1)
    cluster.wait(job, end)
    verdict = judge(job)
    assert verdict.output and verdict.codes == {f"batch_{end}": 100 - len(verdict.output)}
    assert_sums(cluster, job)


def test_a_batch_that_nobody_runs_is_cancelled_at_once(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    job = cluster.submit(50)
    cluster.wait(job, "in_progress")
    shown = cluster.get(job)
    assert shown["waiting_for"] == "no worker for model tiny"
    assert shown["progress"] == {"phase": "running", "share": None} and shown["estimated_completion_at"] is None
    first, second = cluster.cancel(job), cluster.cancel(job)
    assert (first.status_code, second.status_code) == (200, 200)
    cluster.wait(job, "cancelled")
    assert cluster.cancel(job).status_code == 200
    assert judge(job).codes == {"batch_cancelled": 50}
    assert_sums(cluster, job)
