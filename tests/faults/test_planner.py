"""Rows 6 to 8: the planner dies, is doubled, or reads what somebody replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from batchsvc.batches.tables import Window
from batchsvc.dispatch import CeleryDispatcher
from batchsvc.files.tables import File
from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
WINDOWS = {"BATCHSVC_WINDOW_LINES": 25, "BATCHSVC_UNIT_LINES": 10}


def windows(cluster: Cluster, job: Job) -> list[Window]:
    with cluster.db.reading() as session:
        return list(session.scalars(select(Window).where(Window.batch_id == job.id).order_by(Window.no)))


def assert_planned_once(cluster: Cluster, job: Job, count: int) -> None:
    assert [(window.first_line, window.last_line) for window in windows(cluster, job)] == [
        (first, first + 24) for first in range(1, count, 25)
    ]
    units = cluster.units(job)
    assert sum(unit.num_lines for unit in units) == count
    assert max(Counter(unit.no for unit in units).values()) == 1


def test_row_06_planner_killed_at_each_window(cluster: Cluster, judge: Judge) -> None:
    job = cluster.submit(100)
    for number in range(4):
        victim = cluster.start("control", failpoints="window.stored=kill", **WINDOWS)
        victim.died()
        assert len(windows(cluster, job)) == number, "what is stored doesn't count yet"
        victim = cluster.start("control", failpoints="window.planned=kill", **WINDOWS)
        victim.died()
        assert len(windows(cluster, job)) == number + 1, "it goes on where the last one counted"
    cluster.start("control", **WINDOWS)
    cluster.wait(job, "in_progress")
    assert_planned_once(cluster, job, 100)
    cluster.start("engine")
    cluster.wait(job, "completed")
    judge(job)


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_07_two_planners_of_one_window(cluster: Cluster, judge: Judge, tmp_path: Path) -> None:
    """The first is stopped when its window is stored; the second plans all; the first wakes up and may not count."""
    go_on = tmp_path / "go-on"
    first = cluster.start("control", failpoints=f"window.stored=wait:{go_on}@2", **WINDOWS)
    job = cluster.submit(100)
    cluster.until(lambda: cluster.passed("window.stored"), "the first planner is there")
    cluster.stop(first)
    go_on.touch()
    cluster.start("control", **WINDOWS)
    hints = CeleryDispatcher(cluster.services.redis_url)
    for _ in range(5):
        hints.plan(job.id)  # delivered as often as it likes
    cluster.wait(job, "in_progress")
    first.resume()
    hints.plan(job.id)
    hints.close()
    cluster.start("engine")
    cluster.wait(job, "completed")
    assert_planned_once(cluster, job, 100)
    judge(job)


def replace_input(cluster: Cluster, job: Job) -> None:
    with cluster.db.reading() as session:
        key = session.get_one(File, cluster.batch(job).input_file_id).s3_key
    cluster.store.delete([key])
    cluster.store.put(key, b'{"custom_id": "another"}\n')


@pytest.mark.parametrize("moment", ["before planning", "between two windows"])
def test_row_08_input_replaced(cluster: Cluster, judge: Judge, moment: str) -> None:
    job = cluster.submit(100)
    if moment == "between two windows":
        cluster.start("control", failpoints="window.planned=kill", **WINDOWS).died()
    replace_input(cluster, job)
    cluster.start("control", **WINDOWS)
    cluster.start("engine")
    cluster.wait(job, "failed")
    (reason,) = cluster.get(job)["errors"]["data"]
    assert reason["param"] == "input_file_id"
    assert "replaced" in reason["message"]
    cluster.until(lambda: not cluster.units(job), "its plan is forgotten")
    with cluster.db.transaction() as session:  # the replaced bytes aren't what the row says: that is the fault itself
        session.get_one(File, cluster.batch(job).input_file_id).deleted_ms = 1
    judge(job)


def test_row_08_unit_file_replaced(cluster: Cluster, judge: Judge) -> None:
    """Nothing of a unit file that isn't what was planned is run; with the right bytes back, the batch ends."""
    cluster.start("control")
    job = cluster.submit(60)
    cluster.wait(job, "in_progress")
    one, two = cluster.units(job)[:2]
    right = cluster.store.get(one.s3_key)
    cluster.store.delete([one.s3_key])
    cluster.store.put(one.s3_key, cluster.store.get(two.s3_key))
    cluster.start("engine")
    cluster.until(lambda: {unit.state for unit in cluster.units(job)[1:]} == {"done"}, "the sound units")
    assert cluster.batch(job).status == "in_progress"
    assert cluster.units(job)[0].num_done == 0
    cluster.store.delete([one.s3_key])
    cluster.store.put(one.s3_key, right)
    cluster.wait(job, "completed")
    assert max(judge(job).runs.values()) == 1
