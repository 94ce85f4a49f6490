"""Rows 35 to 38, 42 and 44: a store that answers badly, in front of parts, unit files and result files."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select

from batchsvc.batches.tables import Part
from batchsvc.store import keys
from tests.faults.cluster import Cluster
from tests.faults.judge import Verdict
from tests.faults.s3_proxy import Rule
from tests.faults.targets import s3_proxied

Judge = Callable[..., Verdict]
pytestmark = pytest.mark.faults

PATIENT = {"BATCHSVC_LEASE_S": 60}  # no lease is lost to a busy machine, so that attempts can be counted
# 3,600 answers of 400 words are more than 8 MiB: the output is a multipart upload
BIG = {"count": 3_600, "max_tokens": 400}
FAST_ENGINE = {"BATCHSVC_FAKE_TOKENS_PER_S": 0, "BATCHSVC_UNIT_LINES": 512, "BATCHSVC_WAITING_REQUESTS": 512}


def part_objects(cluster: Cluster, batch_id: str) -> set[str]:
    return {key for key, _ in cluster.store.list_keys(f"{keys.BATCHES}{batch_id}/part/")}


def assert_one_published_set(cluster: Cluster, batch_id: str) -> None:
    """Whatever attempts there were: one output file, and no other object beside it once garbage is collected."""
    left = {key for key, _ in cluster.store.list_keys(f"{keys.BATCHES}{batch_id}/out/")}
    assert len(left) == 1, f"one published object, no other attempt's: {left}"


@pytest.mark.quick_faults
def test_row_35_slow_down_costs_no_line_and_no_attempt(cluster: Cluster, judge: Judge) -> None:
    with s3_proxied(cluster, cluster.rng.randrange(1000)) as proxy:
        cluster.start("control", **PATIENT)
        job = cluster.submit(200)
        cluster.wait(job, "in_progress")
        proxy.rules = [slow := Rule(effect="answer", probability=0.3)]
        for _ in range(2):
            cluster.start("engine", **PATIENT)
        cluster.wait(job, "completed")
        assert slow.num_hits > 5, "the store did answer SlowDown"
        proxy.heal()  # a download answers 503 where four tries in a row met SlowDown: it's read once that is over
        verdict = judge(job)
    assert len(verdict.output) == 200
    assert not any(unit.crash_count for unit in cluster.units(job)), "a store that is slow is no crash"


def test_row_36_a_part_that_was_stored_and_failed_gets_a_new_key(cluster: Cluster, judge: Judge) -> None:
    with s3_proxied(cluster) as proxy:
        cluster.start("control")
        job = cluster.submit(120)
        cluster.wait(job, "in_progress")
        late = Rule(effect="late_error", methods="PUT", pattern="/part/", times=9, status=500, code="InternalError")
        proxy.rules = [late]
        cluster.start("engine", **PATIENT)
        cluster.until(lambda: late.num_hits == 9, "all errors are given")
        cluster.until(lambda: cluster.num_done(job) > 0, "a part counts")
        with cluster.db.reading() as session:
            counted = set(session.scalars(select(Part.s3_key).where(Part.batch_id == job.id)))
        assert part_objects(cluster, job.id) - counted, "what was stored under a refused key is an orphan"
        cluster.wait(job, "completed")
        judge(job)  # collects the orphans
    assert len(cluster.parts(job)) == len({part.s3_key for part in cluster.parts(job)})


def test_row_37_what_is_cut_or_bent_on_the_way_is_read_again(cluster: Cluster, judge: Judge) -> None:
    with s3_proxied(cluster) as proxy:
        cluster.start("control")
        job = cluster.submit(100)
        cluster.wait(job, "in_progress")
        units = [
            Rule(effect="truncate", methods="GET", pattern="/unit/", times=3),
            Rule(effect="corrupt", methods="GET", pattern="/unit/", times=1),
        ]
        parts = Rule(effect="truncate", methods="GET", pattern="/part/", times=7)
        proxy.rules = [*units, parts]
        cluster.start("engine")
        cluster.wait(job, "completed")
        assert parts.num_hits == 7 and [rule.num_hits for rule in units] == [3, 1]
        assert len(judge(job).output) == 100


@pytest.mark.parametrize("effect", ["answer", "lost_reply"])
def test_row_38_a_complete_that_says_one_thing_and_did_another(cluster: Cluster, judge: Judge, effect: str) -> None:
    """Five times in a row: more often than boto3 repeats a call, so that our own code has to find out."""
    with s3_proxied(cluster) as proxy:
        control = cluster.start("control", BATCHSVC_WINDOW_LINES=600)
        job = cluster.submit(**BIG)
        complete = Rule(
            effect=effect, methods="POST", pattern=r"/out/.*uploadId=", times=5, status=200, code="InternalError"
        )
        proxy.rules = [complete]
        cluster.start("engine", **FAST_ENGINE, **PATIENT)
        cluster.wait(job, "completed")
        assert complete.num_hits >= (5 if effect == "answer" else 1)
        assert control.is_alive
        assert len(judge(job).output) == BIG["count"]
        assert_one_published_set(cluster, job.id)


@pytest.mark.quick_faults
def test_row_42_a_full_disk_pauses_the_work_and_says_so(cluster: Cluster, judge: Judge) -> None:
    with s3_proxied(cluster) as proxy:
        cluster.start("control")
        job = cluster.submit(200)
        cluster.wait(job, "in_progress")
        full = Rule(effect="answer", methods="PUT", status=507, code="InsufficientStorage")
        engine = cluster.start("engine", **PATIENT)
        cluster.until(lambda: cluster.num_done(job) > 0, "a part counts")
        proxy.rules = [full]
        cluster.until(lambda: full.num_hits >= 4, "the disk is full")
        done, claims = cluster.num_done(job), sum(unit.epoch for unit in cluster.units(job))
        seen = full.num_hits
        cluster.until(lambda: full.num_hits >= seen + 2, "it tries again")
        assert cluster.num_done(job) == done, "nothing counts that isn't stored"
        assert sum(unit.epoch for unit in cluster.units(job)) == claims, "nothing is claimed meanwhile"
        assert "part.not_written" in engine.text(), "the log says so"
        proxy.heal()
        cluster.wait(job, "completed")
        verdict = judge(job)
    assert len(verdict.output) == 200 and verdict.needless == 0, "nothing was lost, nothing ran again"


def test_row_44_a_conflict_is_repeated_and_not_taken_for_a_loss(cluster: Cluster, judge: Judge) -> None:
    with s3_proxied(cluster, cluster.rng.randrange(1000)) as proxy:
        cluster.start("control")
        job = cluster.submit(200)
        cluster.wait(job, "in_progress")
        conflict = Rule(
            effect="answer", methods="PUT POST", probability=0.4, status=409, code="ConditionalRequestConflict"
        )
        proxy.rules = [conflict]
        for _ in range(2):
            cluster.start("engine", **PATIENT)
        cluster.wait(job, "completed")
        assert conflict.num_hits > 3
        verdict = judge(job)
    assert len(verdict.output) == 200 and verdict.needless == 0
