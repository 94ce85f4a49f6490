"""Rows 9 to 13: an engine worker killed at each point between a claim and the end of a unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]


def killed(cluster: Cluster, judge: Judge, failpoint: str, *, count: int = 100) -> Verdict:
    """A batch whose first worker dies at a failpoint, and whose second one ends it."""
    cluster.start("control")
    victim = cluster.start("engine", failpoints=f"{failpoint}=kill@2")
    job = cluster.submit(count)
    victim.died()
    assert cluster.passed(failpoint) == 1
    cluster.start("engine")
    cluster.wait(job, "completed")
    return judge(job)


def test_row_09_killed_after_the_claim(cluster: Cluster, judge: Judge) -> None:
    killed(cluster, judge, "unit.claimed")
