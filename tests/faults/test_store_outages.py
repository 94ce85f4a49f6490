"""Rows 39 to 41, 43 and 45: a store that is away, slow or restarted; objects that are damaged or swept too early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from batchsvc.batches.tables import Segment
from batchsvc.clock import monotonic_s
from batchsvc.store import keys
from tests.faults import judge as judging
from tests.faults.cluster import Cluster, Job
from tests.faults.judge import Verdict
from tests.faults.proxy import Link
from tests.faults.restartable import own_s3
from tests.faults.targets import s3_proxied
from tests.faults.test_store_answers import BIG, FAST_ENGINE, assert_one_published_set
from workers.garbage import Collector

Judge = Callable[..., Verdict]
pytestmark = pytest.mark.faults


def claims(cluster: Cluster, job: Job) -> int:
    return sum(unit.epoch for unit in cluster.units(job))


def usual_audit(cluster: Cluster) -> int:
    """Sweep the store; returns how many objects were deleted."""
    return Collector(cluster.settings, cluster.db, cluster.store).audit()


def audit_without_grace(cluster: Cluster) -> int:
    """The same as if every object were old; the store tells the time of a write in whole seconds."""
    time.sleep(1.1)
    at_once = cluster.settings.model_copy(update={"garbage_grace_s": 0.0})
    return Collector(at_once, cluster.db, cluster.store).audit()


def test_row_39_a_store_that_is_down_stops_the_claims_and_costs_nothing(cluster: Cluster, judge: Judge) -> None:
    with s3_proxied(cluster) as proxy:
        cluster.start("control")
        job = cluster.submit(400)
        cluster.wait(job, "in_progress")
        engines = [cluster.start("engine", BATCHSVC_LEASE_S=8) for _ in range(2)]
        cluster.until(lambda: all(cluster.holds(engine, job) for engine in engines), "both work")
        cluster.until(lambda: cluster.num_done(job) > 0, "a part counts")
        proxy.refuse()
        signs = ("part.not_written", "store.still_away")  # of one that writes, and of one that could read no unit
        cluster.until(lambda: all(any(s in e.text() for s in signs) for e in engines), "both have noticed")
        done, claimed, began = cluster.num_done(job), claims(cluster, job), monotonic_s()
        while monotonic_s() - began < 16:  # two leases
            cluster.until(lambda: cluster.silence_s() < 6, "the heart beats on")
            assert cluster.num_done(job) == done, "nothing counts that isn't stored"
        assert claims(cluster, job) <= claimed + len(engines), "nothing is claimed while nothing can be stored"
        assert all(engine.is_alive for engine in engines)
        proxy.heal()
        cluster.wait(job, "completed")
        assert len(judge(job).output) == 400


def test_row_40_a_slow_store_slows_no_heartbeat(cluster: Cluster, judge: Judge) -> None:
    with s3_proxied(cluster) as proxy:
        cluster.start("control")
        job = cluster.submit(60)
        cluster.wait(job, "in_progress")
        # a call takes longer than the lease: were renewals behind it, the lease would be lost
        slow = {"up": Link(latency_s=5, bytes_per_s=1_000), "down": Link(latency_s=5, bytes_per_s=1_000)}
        engine = cluster.start("engine", BATCHSVC_LEASE_S=8)
        cluster.until(lambda: "worker.ready" in engine.text(), "the engine is ready")
        for direction, link in slow.items():
            proxy.set(direction, link)
        slow_since, done = monotonic_s(), cluster.num_done(job)
        cluster.until(lambda: cluster.num_done(job) > done and monotonic_s() - slow_since > 12, "a part counts, slowly")
        assert cluster.silence_s() < 6, "the heart beats on"
        assert not any(unit.crash_count for unit in cluster.units(job)), "no lease was lost"
        proxy.heal()
        cluster.wait(job, "completed")
        assert judge(job).needless == 0


def test_row_41_a_store_killed_during_a_multipart_upload(cluster: Cluster, tmp_path: Path) -> None:
    with own_s3(tmp_path / "s3") as server:
        mine = cluster.with_services(
            s3_endpoint=server.endpoint, s3_access_key=server.access_key, s3_secret_key=server.secret_key
        )
        try:
            go_on = tmp_path / "go-on"
            mine.start("control", failpoints=f"window.merged=wait:{go_on}@6", BATCHSVC_WINDOW_LINES=600)
            job = mine.submit(**BIG)
            mine.start("engine", **FAST_ENGINE)
            mine.until(lambda: mine.passed("window.merged"), "the last window is merged")
            with mine.db.reading() as session:
                assert session.scalars(select(Segment).where(Segment.batch_id == job.id)).all(), "an upload has begun"
            server.kill()
            server.start()
            go_on.touch()
            mine.wait(job, "completed")
            assert len(judging.judge(mine, job).output) == BIG["count"]
            assert_one_published_set(mine, job.id)
        except BaseException:
            mine.show_logs()
            raise
        finally:
            mine.close()


@pytest.mark.parametrize("damage", [pytest.param("bent", marks=pytest.mark.quick_faults), "gone"])
def test_row_43_a_damaged_part_is_run_again_and_paid_once(cluster: Cluster, judge: Judge, damage: str) -> None:
    planner = cluster.start("control")
    job = cluster.submit(100)
    cluster.wait(job, "in_progress")
    planner.kill()  # so that nobody finalizes before the damage is done
    cluster.start("engine")
    cluster.until(lambda: cluster.num_done(job) == 100, "all lines are done")
    victim = cluster.rng.choice([part for part in cluster.parts(job) if part.unit_id])
    if damage == "gone":
        cluster.store.delete([victim.s3_key])
    else:
        data = bytearray(cluster.store.get(victim.s3_key))
        data[cluster.rng.randrange(len(data))] ^= 1 << cluster.rng.randrange(8)
        cluster.store.put(victim.s3_key, bytes(data))
    cluster.start("control")
    cluster.wait(job, "completed")
    verdict = judge(job, counts_may_fall=True)
    assert len(verdict.output) == 100
    assert verdict.needless >= victim.lines_ok, "its lines ran again"
    again = {part.id: part for part in cluster.parts(job)}[victim.id]
    assert again.is_void, "the damaged part counts no more"


@pytest.mark.quick_faults
def test_row_45_the_sweep_spares_what_is_about_to_count(cluster: Cluster, judge: Judge, tmp_path: Path) -> None:
    """The row comes after the object, and the grace is for the time in between. Grace 0 shows it: the lines of a part
    have to run again, and an upload is lost."""
    go_on = tmp_path / "go-on"
    cluster.start("control")
    job = cluster.submit(60)
    cluster.start("engine", failpoints=f"part.stored=wait:{go_on}@1", BATCHSVC_LEASE_S=60)
    cluster.until(lambda: cluster.passed("part.stored"), "a part is stored and doesn't count")
    assert usual_audit(cluster) == 0, "the usual grace outlasts any lease"
    assert audit_without_grace(cluster) == 1, "without it, the part is gone before it counts"
    go_on.touch()
    cluster.wait(job, "completed")
    assert len(judge(job, counts_may_fall=True).output) == 60
    assert sum(part.is_void for part in cluster.parts(job)) == 1, "the finalizer has noticed"

    write_it = tmp_path / "write-it"
    slow = cluster.serve(failpoints=f"file.stored=wait:{write_it}")
    uploads = f"{keys.INPUTS}{cluster.project_id}/"
    known = {key for key, _ in cluster.store.list_keys(uploads)}
    thread = threading.Thread(target=lambda: uploaded.append(cluster.upload(cluster.lines(3))))
    uploaded: list[str] = []
    thread.start()
    cluster.until(lambda: cluster.passed("file.stored"), "an upload is stored, its row isn't written")
    cluster.stop(slow)
    write_it.touch()
    assert usual_audit(cluster) == 0, "the usual grace outlasts any upload"
    (unwritten,) = {key for key, _ in cluster.store.list_keys(uploads)} - known
    assert audit_without_grace(cluster) >= 1
    assert unwritten not in {key for key, _ in cluster.store.list_keys(uploads)}, "without it, the file is lost"
    slow.resume()
    thread.join(60)
