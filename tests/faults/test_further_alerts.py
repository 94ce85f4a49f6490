"""Alerts of processes, tasks, claims, error lines and exports: each fires while its fault lasts, and clears after it.

Those of the numbered rows of the matrix are in test_alerts.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from batchsvc.accounts import service as accounts
from batchsvc.accounts.tables import IdempotentAnswer
from batchsvc.batches import tally_queries
from batchsvc.batches.tables import Export
from tests.faults.cluster import MODEL, Cluster, Job
from tests.faults.judge import Verdict
from tests.faults.s3_proxy import in_front_of_s3
from tests.faults.scraping import Scraper
from tests.faults.targets import s3_proxied, through
from tests.faults.test_alerts import long_ago
from tests.faults.test_engine_faults import lines_with
from tests.promql import Vector
from tests.tenant_store import LOOPBACK, Tenant

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]


def labels_of(vector: Vector) -> list[dict[str, str]]:
    return [dict(labels) for labels in vector]


def as_operator(cluster: Cluster, path: str, **body: Any) -> None:
    """One act of an operator, over HTTP."""
    with cluster.db.transaction() as session:
        _, key = accounts.create_key(session, cluster.project_id, "operator", is_admin=True)
    cluster.secrets.append(key)
    answer = cluster.call("POST", f"/v1/admin/{path}", key=key, json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.quick_faults
def test_a_process_that_hangs_is_a_target_that_is_down(cluster: Cluster) -> None:
    """It holds its port and answers nobody; the same process clears it, for its name is still on the list."""
    api = cluster.serve()
    with closing(Scraper(cluster, timeout_s=2)) as scraper:
        cluster.until(lambda: scraper.scrape(), "it is seen")
        scraper.is_quiet("BatchsvcTargetDown")
        cluster.stop(api)
        scraper.fires("BatchsvcTargetDown")
        assert labels_of(scraper.firing("BatchsvcTargetDown")) == [{"job": "batchsvc-api", "instance": api.name}]
        api.resume()
        scraper.is_quiet("BatchsvcTargetDown")


@pytest.mark.quick_faults
def test_a_worker_that_was_taken_out_is_not_ready(cluster: Cluster, scraper: Scraper) -> None:
    """All its parts answer, so nothing else tells that it does no work, but the operator's own order."""
    engine = cluster.start("engine", BATCHSVC_WORKER_NAME="gpu-7")
    cluster.serve()
    cluster.until(lambda: "worker.ready" in engine.text(), "it is ready")
    scraper.is_quiet("BatchsvcNotReady")
    as_operator(cluster, "workers/gpu-7/drain", reason="new engine")
    scraper.fires("BatchsvcNotReady")
    scraper.fires("BatchsvcClaimsHeld")
    assert labels_of(scraper.firing("BatchsvcClaimsHeld")) == [{"kind": "worker"}]
    ready = cluster.http.get(f"{engine.signals}/readyz")
    assert ready.status_code == 503
    assert [part for part, says in ready.json()["parts"].items() if says != "ok"] == ["engine"]
    others = ("BatchsvcTargetDown", "BatchsvcDatabaseDown", "BatchsvcStoreDown", "BatchsvcRedisDown")
    assert not any(scraper.firing(name) for name in others)
    as_operator(cluster, "workers/gpu-7/undrain")
    scraper.is_quiet("BatchsvcNotReady")
    scraper.is_quiet("BatchsvcClaimsHeld")


@pytest.mark.quick_faults
def test_a_step_of_the_reaper_that_fails(cluster: Cluster, scraper: Scraper) -> None:
    """Tick after tick, because its table is gone, as after a migration by hand; the others go on."""
    control = cluster.start("control")
    scraper.sees(control)
    cluster.until(lambda: ticks(cluster) > 1, "the reaper ticks")
    scraper.is_quiet("BatchsvcReaperFailing")
    table = IdempotentAnswer.__tablename__
    rename(cluster, table, "elsewhere")
    scraper.fires("BatchsvcReaperFailing")
    assert '"step": "answers"' in control.text() and "reaper.crashed" not in control.text()
    ticked = ticks(cluster)
    rename(cluster, "elsewhere", table)
    cluster.until(lambda: ticks(cluster) > ticked + 2, "it ticked meanwhile, and does")
    scraper.wait_s(16 * 60)
    scraper.is_quiet("BatchsvcReaperFailing")
    scraper.is_quiet("BatchsvcReaperStopped")


@pytest.mark.quick_faults
def test_a_task_that_crashes(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    """The reaper sends it again, and the batch ends as ever; the alert stays for as long as it looks back."""
    control = cluster.start("control", failpoints="plan.claimed=raise@1")
    cluster.start("engine")
    scraper.sees(control)
    scraper.is_quiet("BatchsvcTasksCrash")
    job = cluster.submit(10)
    scraper.fires("BatchsvcTasksCrash")
    assert labels_of(scraper.firing("BatchsvcTasksCrash")) == [{"task": "batch.plan"}]
    cluster.wait(job, "completed")
    scraper.wait_s(16 * 60)
    scraper.is_quiet("BatchsvcTasksCrash")
    judge(job)


def test_a_task_that_always_crashes_stops_nothing_else(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    """Messages about it help nothing, so the reaper does it itself: its other steps must go on as if nothing was."""
    victim = cluster.start("control", failpoints="window.stored=raise")
    scraper.sees(victim)
    scraper.is_quiet("BatchsvcTasksCrash")
    job = cluster.submit(10)
    cluster.until(lambda: cluster.passed("window.stored") > 10, "it was tried here, too")
    ticked = ticks(cluster)
    cluster.until(lambda: ticks(cluster) > ticked + 5, "the reaper ticks on", 30)
    scraper.fires("BatchsvcTasksCrash")
    scraper.is_quiet("BatchsvcReaperStopped")
    victim.kill()
    scraper.forget(victim)
    cluster.start("control")
    cluster.start("engine")
    cluster.wait(job, "completed")
    scraper.wait_s(16 * 60)
    scraper.is_quiet("BatchsvcTasksCrash")
    judge(job)


@pytest.mark.quick_faults
def test_workers_that_take_none_of_the_work(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    """A worker lives and is ready, and neither hears of work nor looks for any."""
    cluster.serve(TEST_HINTS=0)
    cluster.start("control", TEST_HINTS=0)
    deaf = cluster.start("engine", BATCHSVC_POLL_S=3_600)
    cluster.until(lambda: "worker.ready" in deaf.text(), "it is ready")
    job = cluster.submit(20)
    cluster.wait(job, "in_progress")
    scraper.is_quiet("BatchsvcWorkNotStarting")
    long_ago(cluster, job, "in_progress_ms")
    scraper.fires("BatchsvcWorkNotStarting")
    expected = {"model": MODEL, "model_digest": cluster.model.digest}
    assert labels_of(scraper.firing("BatchsvcWorkNotStarting")) == [expected]
    scraper.is_quiet("BatchsvcNoWorker")
    cluster.start("engine")
    cluster.wait(job, "completed")
    scraper.is_quiet("BatchsvcWorkNotStarting")
    judge(job)


@pytest.mark.quick_faults
def test_claims_and_a_batch_that_an_operator_stopped(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    """Both tell of what somebody has ordered and may have forgotten; the twins of the verbs clear them."""
    cluster.start("control")
    cluster.serve()
    as_operator(cluster, "claims/pause", reason="new disks")
    as_operator(cluster, "claims/pause", model=MODEL)
    job = cluster.submit(20)
    cluster.wait(job, "in_progress")
    scraper.is_quiet("BatchsvcBatchPaused")
    scraper.fires("BatchsvcClaimsHeld")
    assert sorted(each["kind"] for each in labels_of(scraper.firing("BatchsvcClaimsHeld"))) == ["everything", "model"]
    cluster.start("engine")
    as_operator(cluster, f"batches/{job.id}/pause", reason="its owner asked")
    as_operator(cluster, "claims/resume")
    as_operator(cluster, "claims/resume", model=MODEL)
    scraper.is_quiet("BatchsvcClaimsHeld")
    scraper.fires("BatchsvcBatchPaused")
    as_operator(cluster, f"batches/{job.id}/resume")
    scraper.is_quiet("BatchsvcBatchPaused")
    cluster.wait(job, "completed")
    judge(job)


@pytest.mark.quick_faults
def test_lines_that_end_as_errors(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    """An engine that computes nonsense for every second line. A few such lines in half an hour wake nobody."""
    cluster.serve()
    cluster.start("control")
    cluster.start("engine", BATCHSVC_FAKE_FAULTS="nan:spoilt")
    cluster.until(lambda: scraper.scrape() and num_lines(scraper) is not None, "the API has heard of the engine")
    few = cluster.submit(0, lines=lines_with(cluster, 10, "spoilt", set(range(1, 6))))
    cluster.wait(few, "completed")
    cluster.until(lambda: scraper.scrape() and num_lines(scraper) == 10, "the API has heard of its lines")
    scraper.is_quiet("BatchsvcErrorLines")
    many = cluster.submit(0, lines=lines_with(cluster, 40, "spoilt", set(range(1, 21))))
    cluster.wait(many, "completed")
    scraper.fires("BatchsvcErrorLines")
    expected = {"model": MODEL, "model_digest": cluster.model.digest}
    assert labels_of(scraper.firing("BatchsvcErrorLines")) == [expected]
    scraper.wait_s(31 * 60)
    scraper.is_quiet("BatchsvcErrorLines")
    for job in (few, many):
        judge(job, errors={"invalid_logits"})


@pytest.mark.quick_faults
def test_results_that_a_tenants_store_does_not_take(cluster: Cluster, scraper: Scraper, tenant: Tenant) -> None:
    cluster.env["BATCHSVC_EGRESS_ALLOW"] = LOOPBACK
    with in_front_of_s3(tenant.server.endpoint) as proxy:
        tenant.register(cluster.db, cluster.project_id, "out/", endpoint=through(tenant.server.endpoint, proxy))
        cluster.start("control")
        cluster.start("engine")
        body = {"output_s3": tenant.uri("out/")}
        job = Job(cluster.create(cluster.upload(cluster.lines(10)), **body).json()["id"], [], "")  # unwatched: it ages
        proxy.refuse()
        cluster.wait(job, "completed")
        scraper.is_quiet("BatchsvcExportsLate")
        long_ago(cluster, job, "ended_ms")
        scraper.fires("BatchsvcExportsLate")
        cluster.until(lambda: export(cluster, job).num_failures, "an attempt failed")
        proxy.heal()
        with cluster.db.transaction() as session:
            session.get_one(Export, job.id).due_ms = 1
        cluster.until(lambda: export(cluster, job).state == "done", "they are over there")
        scraper.is_quiet("BatchsvcExportsLate")
        assert f"out/{job.id}/manifest.json" in tenant.objects()


@pytest.mark.quick_faults
def test_calls_that_fail(cluster: Cluster, scraper: Scraper) -> None:
    """Uploads while the store is away. What a caller does wrong is no failure of ours, however often."""
    with s3_proxied(cluster) as proxy:
        cluster.serve()
        cluster.upload(cluster.lines(1))
        scraper.is_quiet("BatchsvcRequestsFail")
        for _ in range(10):
            assert cluster.call("GET", "/v1/batches/batch_none").status_code == 404
        scraper.is_quiet("BatchsvcRequestsFail")
        proxy.refuse()
        form = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
        assert {cluster.call("POST", "/v1/files", **form).status_code for _ in range(2)} == {503}
        scraper.fires("BatchsvcRequestsFail")
        proxy.heal()
        cluster.upload(cluster.lines(1))
        scraper.wait_s(6 * 60)
        scraper.is_quiet("BatchsvcRequestsFail")


def rename(cluster: Cluster, table: str, name: str) -> None:
    with closing(sqlite3.connect(cluster.services.database_url.removeprefix("sqlite:///"), timeout=60)) as connection:
        connection.execute(f"ALTER TABLE {table} RENAME TO {name}")


def ticks(cluster: Cluster) -> int:
    """Ticks of reapers that came to their end."""
    with cluster.db.reading() as session:
        found = tally_queries.all_of(session).get("reaper_ticks")
    return found.num if found else 0


def num_lines(scraper: Scraper) -> float | None:
    """Lines that the API says to have ended; None before it has heard of an engine."""
    found = scraper.prometheus.query("sum(batchsvc_lines_total)", scraper.now_s())
    return next(iter(found.values()), None)


def export(cluster: Cluster, job: Job) -> Export:
    with cluster.db.reading() as session:
        return session.get_one(Export, job.id)
