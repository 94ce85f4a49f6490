"""Rows 57 to 59: two finalizers at once, killed finalizers, and a part that comes between sealing and reading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict
from tests.faults.test_store_answers import BIG, FAST_ENGINE, assert_one_published_set

Judge = Callable[..., Verdict]
pytestmark = pytest.mark.faults

POINTS = ("batch.sealed", "window.merged", "output.stored", "batch.publishing", "batch.published")
SEVERAL_WINDOWS = {"BATCHSVC_WINDOW_LINES": 30}


def planned_and_run(cluster: Cluster, count: int = 100) -> Job:
    """A batch whose lines are all done and that nobody finalizes yet."""
    planner = cluster.start("control", **SEVERAL_WINDOWS)
    job = cluster.submit(count)
    cluster.wait(job, "in_progress")
    planner.kill()
    engine = cluster.start("engine")
    cluster.until(lambda: cluster.num_done(job) == count, "all lines are done")
    engine.kill()
    return job


@pytest.mark.parametrize("point", [*POINTS[:3], pytest.param(POINTS[3], marks=pytest.mark.quick_faults), POINTS[4]])
def test_row_57_a_finalizer_that_comes_back_finds_it_done(
    cluster: Cluster, judge: Judge, tmp_path: Path, point: str
) -> None:
    job, go_on = planned_and_run(cluster), tmp_path / "go-on"
    first = cluster.start("control", failpoints=f"{point}=wait:{go_on}@1")
    cluster.until(lambda: cluster.passed(point), "the first is there")
    cluster.stop(first)
    go_on.touch()
    epoch = cluster.batch(job).fin_epoch
    cluster.start("control")
    cluster.wait(job, "completed")
    ended = cluster.batch(job)
    assert (ended.fin_epoch > epoch) == (point != "batch.published")
    first.resume()
    if point != "batch.published":
        cluster.until(lambda: "batch.not_finalized" in first.text(), "the first notices")
    after = cluster.batch(job)
    assert (after.output_file_id, after.error_file_id) == (ended.output_file_id, ended.error_file_id)
    assert after.ended_ms == ended.ended_ms
    assert len(judge(job).output) == 100
    assert_one_published_set(cluster, job.id)


def test_row_57_both_start_in_the_same_moment(cluster: Cluster, judge: Judge) -> None:
    job = planned_and_run(cluster)
    for _ in range(3):
        cluster.start("control", TEST_HINTS=3)
    cluster.wait(job, "completed")
    assert len(judge(job).output) == 100
    assert_one_published_set(cluster, job.id)


@pytest.mark.parametrize("point", [*POINTS, "window.merged twice"])
def test_row_58_a_killed_finalizer_has_a_successor(cluster: Cluster, judge: Judge, point: str) -> None:
    job = planned_and_run(cluster)
    name, _, again = point.partition(" ")
    for nth in (1, 2) if again else (1,):
        cluster.start("control", failpoints=f"{name}=kill@{nth}").died()
    cluster.start("control")
    cluster.wait(job, "completed")
    assert len(judge(job).output) == 100
    assert_one_published_set(cluster, job.id)


@pytest.mark.parametrize("point", ["window.merged=kill@6", "output.stored=kill@1"])
def test_row_58_killed_before_and_after_complete(cluster: Cluster, judge: Judge, point: str) -> None:
    """The output is a multipart upload here: begun but not completed, and completed but not published."""
    killed = cluster.start("control", failpoints=point, BATCHSVC_WINDOW_LINES=600)
    job = cluster.submit(**BIG)
    cluster.start("engine", **FAST_ENGINE)
    killed.died()
    cluster.start("control")
    cluster.wait(job, "completed")
    assert len(judge(job).output) == BIG["count"]
    assert_one_published_set(cluster, job.id)


@pytest.mark.quick_faults
@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_59_a_part_between_sealing_and_reading_counts_no_more(
    cluster: Cluster, judge: Judge, tmp_path: Path
) -> None:
    gate, read_on = tmp_path / "gate", tmp_path / "read-on"
    cluster.start("control")
    job = cluster.submit(100)
    worker = cluster.start("engine", failpoints=f"part.stored=wait:{gate}@3")
    cluster.until(lambda: cluster.passed("part.stored"), "a part is stored and doesn't count")
    cluster.stop(worker)  # it can't let go of its units, so that sealing has to take them
    cluster.cancel(job)
    finalizer = cluster.start("control", failpoints=f"batch.sealed=wait:{read_on}@1")
    cluster.alive("control")[0].kill()
    cluster.until(lambda: cluster.passed("batch.sealed"), "it is sealed, and not read")
    cluster.stop(finalizer)
    read_on.touch()
    before = {part.id for part in cluster.parts(job)}
    gate.touch()
    worker.resume()
    cluster.until(lambda: "unit.lost" in worker.text() or "lease.gone" in worker.text(), "the worker has noticed")
    assert {part.id for part in cluster.parts(job)} == before, "the part doesn't count"
    finalizer.resume()
    cluster.wait(job, "cancelled")
    verdict = judge(job)
    assert verdict.codes == {"batch_cancelled": 100 - len(verdict.output)}
