"""Rows 17 to 19: a worker that is asked to end, in order or not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.faults import witness
from tests.faults.cluster import Cluster, Job, Process
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
GRACE_S = 9
SHAPES = [
    {},
    {"n": 3, "logprobs": True, "top_logprobs": 2, "temperature": 0.7},
    {"logprobs": True},
    {"guided_json": {"type": "array", "items": {"type": "string"}}, "n": 2},
]


def busy(cluster: Cluster, **settings: object) -> tuple[Process, Job]:
    """A worker in the middle of long answers of all shapes."""
    cluster.start("control")
    worker = cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=100, BATCHSVC_TERM_GRACE_S=GRACE_S, **settings)
    lines = cluster.lines(60, max_tokens=200)
    for number, line in enumerate(lines):
        line["body"] |= SHAPES[number % len(SHAPES)]
    job = cluster.submit(60, lines=lines)
    cluster.until(lambda: witness.read(cluster.witness).num_tokens() > 100, "it generates")
    return worker, job


def finish(cluster: Cluster, judge: Judge, job: Job) -> Verdict:
    # with a lease that it keeps on a busy machine: what it would lose and run again was not lost by the first one
    cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=20_000, BATCHSVC_LEASE_S=30)
    cluster.wait(job, "completed")
    return judge(job)


@pytest.mark.quick_faults
def test_row_17_drained(cluster: Cluster, judge: Judge) -> None:
    worker, job = busy(cluster, BATCHSVC_LEASE_S=30)  # on a busy machine, too, it loses nothing before
    worker.term()
    asked_s = time.monotonic()
    assert worker.wait() == 0
    assert time.monotonic() - asked_s < 2 * GRACE_S
    assert not cluster.holds(worker), "its leases are free at once"
    assert not any(unit.crash_count for unit in cluster.units(job)), "and that is no crash"
    counted = cluster.counted_lines(job)
    verdict = finish(cluster, judge, job)
    assert all(verdict.runs[line] == 1 for line in counted)
    delivered = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in verdict.output)
    assert witness.read(cluster.witness).num_tokens() == delivered, "a drain loses no token"


def test_row_18_killed_while_it_drains(cluster: Cluster, judge: Judge) -> None:
    worker, job = busy(cluster)
    worker.term()
    time.sleep(2)
    worker.kill()
    counted = cluster.counted_lines(job)
    verdict = finish(cluster, judge, job)
    assert all(verdict.runs[line] == 1 for line in counted)


@pytest.mark.parametrize("second", ["SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP"])
def test_row_19_signalled_twice(cluster: Cluster, judge: Judge, second: str) -> None:
    worker, job = busy(cluster)
    worker.term()
    cluster.until(lambda: "worker.draining" in worker.text(), "the drain")
    worker.send(signal.Signals[second])
    assert worker.wait() == 0
    assert not cluster.holds(worker)
    finish(cluster, judge, job)  # the judge finds a traceback in any log
