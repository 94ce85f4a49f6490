"""Rows 20 to 25: engines that die, run short of memory, hang, talk nonsense, don't load, or are all gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
POISON = 17  # the line whose prompt says so


def lines_with(cluster: Cluster, count: int, word: str, numbers: set[int]) -> list[dict[str, object]]:
    """Requests of which some have a word that the engine is told to fear."""
    lines = cluster.lines(count)
    for number in numbers:
        lines[number - 1]["body"]["messages"][0]["content"] += f" {word}"
    return lines


def keep_alive(cluster: Cluster, job: Job, statuses: set[str], **settings: object) -> int:
    """Start an engine worker again whenever one died, as a supervisor does. Returns how often one died."""
    cluster.start("engine", **settings)
    deaths = 0

    def ended() -> bool:
        nonlocal deaths
        if not cluster.alive("engine"):
            deaths += 1
            cluster.start("engine", **settings)
        return cluster.batch(job).status in statuses

    cluster.until(ended, "the batch ends", 180)
    return deaths


def test_row_20_a_line_that_kills_the_worker(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    job = cluster.submit(0, lines=lines_with(cluster, 40, "poison", {POISON}))
    healthy = cluster.submit(40)
    deaths = keep_alive(
        cluster, job, {"completed"}, BATCHSVC_FAKE_FAULTS="die:poison", BATCHSVC_FAKE_TOKENS_PER_S=3_000
    )
    cluster.wait(healthy, "completed")
    verdict = judge(job, errors={"poison"})
    assert [line["line"] for line in verdict.errors] == [POISON], "exactly that line"
    assert len(judge(healthy).output) == 40
    assert 2 <= deaths <= 14


def test_row_21_the_engine_runs_short_of_memory(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    worker = cluster.start("engine", BATCHSVC_FAKE_FAULTS="oom:3")
    job = cluster.submit(60)
    cluster.wait(job, "completed")
    assert worker.is_alive, "it runs smaller steps instead of dying"
    verdict = judge(job)
    assert len(verdict.output) == 60
    assert verdict.needless == 0
    assert not any(unit.crash_count for unit in cluster.units(job)), "nobody is blamed"


def test_row_22_the_engine_hangs(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    worker = cluster.start("engine", BATCHSVC_FAKE_FAULTS="hang:200", BATCHSVC_HUNG_S=2)
    job = cluster.submit(60)
    assert worker.wait() != 0, "the watchdog ends it"
    assert "The engine hangs" in worker.text()
    counted = cluster.counted_lines(job)
    assert counted
    cluster.start("engine")
    cluster.wait(job, "completed")
    verdict = judge(job)
    assert all(verdict.runs[line] == 1 for line in counted)


def test_a_gpu_that_fails_in_mid_batch(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    worker = cluster.start("engine", BATCHSVC_FAKE_FAULTS="gpu:200")
    job = cluster.submit(60)
    assert worker.wait() == 7, "its own exit code"
    assert "The GPU failed in the middle of a step: CUDA error" in worker.text()
    counted = cluster.counted_lines(job)
    cluster.start("engine")
    cluster.wait(job, "completed")
    verdict = judge(job)
    assert len(verdict.output) == 60
    assert all(verdict.runs[line] == 1 for line in counted)


def test_row_23_lines_that_come_out_as_nonsense(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    worker = cluster.start("engine", BATCHSVC_FAKE_FAULTS="nan:spoilt")
    spoilt = {3, 20, 41, 60}
    job = cluster.submit(0, lines=lines_with(cluster, 60, "spoilt", spoilt))
    cluster.wait(job, "completed")
    assert worker.is_alive
    verdict = judge(job, errors={"invalid_logits"})
    assert {line["line"] for line in verdict.errors} == spoilt
    assert max(verdict.runs.values()) <= 3, "no storm of retries"
    assert all(verdict.runs[line["line"]] == 1 for line in verdict.output)


@pytest.mark.quick_faults
def test_row_24_a_model_that_does_not_load(cluster: Cluster, judge: Judge) -> None:
    broken = cluster.directory / "broken"
    shutil.copytree(cluster.model.path, broken)
    (broken / "config.json").write_text("{}")
    worker = cluster.start("engine", BATCHSVC_MODEL=broken)
    assert worker.wait() == 1
    said = [line for line in worker.text().splitlines() if not line.startswith('{"url"')]  # where its signals are
    assert len(said) == 1, "one sentence"
    cluster.start("control")
    job = cluster.submit(40)
    cluster.wait(job, "in_progress")
    assert "no worker" in cluster.get(job)["waiting_for"]
    cluster.change_batch(job, expires_ms=cluster.batch(job).created_ms + 1)
    cluster.wait(job, "expired")
    assert len(judge(job).errors) == 40


def test_row_25_all_workers_die(cluster: Cluster, judge: Judge) -> None:
    cluster.start("control")
    workers = [cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=200) for _ in range(2)]
    late, patient = cluster.submit(100), cluster.submit(100)
    cluster.until(lambda: cluster.num_done(late) > 10 or cluster.num_done(patient) > 10, "the first parts")
    for worker in workers:
        worker.kill()
    cluster.change_batch(late, expires_ms=cluster.batch(late).created_ms + 1)
    cluster.wait(late, "expired")
    assert cluster.batch(patient).status == "in_progress", "the other one waits"
    cluster.until(lambda: "no worker" in (cluster.get(patient)["waiting_for"] or ""), "it says what for")
    cluster.start("engine")
    cluster.wait(patient, "completed")
    verdict = judge(late)
    assert len(verdict.output) + len(verdict.errors) == 100
    judge(patient)
