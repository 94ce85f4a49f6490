"""Rows whose alert must fire while the fault lasts, and clear once it is mended; and what a whole cluster shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update

from batchsvc import dashboard
from batchsvc.alerts import ALERTS
from batchsvc.batches.tables import Batch, Tally
from batchsvc.db.session import database_now_ms
from batchsvc.webhooks.tables import WebhookDelivery, WebhookEvent
from tests.faults.cluster import MODEL, Cluster, Job
from tests.faults.judge import Verdict
from tests.faults.own_valkey import OwnValkey
from tests.faults.scraping import Scraper
from tests.faults.targets import database_proxied, s3_proxied
from tests.faults.test_engine_faults import lines_with
from tests.faults.test_webhook_faults import LOOPBACK, delivery, hurry, listen
from tests.promql import names_in
from tests.receiver import receiving

pytestmark = pytest.mark.faults
Judge = Callable[..., Verdict]
HOUR_MS = 3_600_000
README = Path(__file__).parents[2] / "README.md"
CLOSED = {
    "model": {MODEL, ""},
    "model_digest": None,  # one for each registered model
    "tier": {"batch_24h", ""},
    "status": None,
    "state": {"validating", "finalizing", "cancelling"},
    "lane": {"interactive", "batch"},
    "outcome": {
        "2xx",
        "3xx",
        "4xx",
        "5xx",
        "ok",
        "error",
        "done",
        "failed",
        "crashed",
        "rejected",
        "cancelled",
        "expired",
        "lost",
        "fenced",
        "gone",
    },
    "kind": {"input", "cached", "output", "everything", "model", "worker"},
    "part": {"database", "store", "redis", "control", "engine"},
    "task": {"batch.plan", "batch.finalize", "quote.plan", "unit.run"},
    "le": None,
}
"""Labels that there may be, and their values where these are known beforehand."""
UNITS = ("seconds", "bytes", "ratio", "nanos", "total", "per_second")


def long_ago(cluster: Cluster, job: Job, column: str, hours: float = 2) -> None:
    """Set a time of the batch back, as a clock would."""
    with cluster.db.transaction() as session:
        values = {column: database_now_ms(session) - round(hours * HOUR_MS)}
        session.execute(update(Batch).where(Batch.id == job.id).values(values))


@pytest.mark.quick_faults
def test_every_metric_of_a_running_cluster_keeps_the_rules(cluster: Cluster, scraper: Scraper) -> None:
    """Prefix, units, counters and labels; and what alerts, dashboard and README name is there. Until its worker comes,
    an alert fires (row 25 in small)."""
    cluster.serve()
    cluster.start("control")
    job = cluster.submit(40)
    scraper.fires("BatchsvcNoWorker")
    engine = cluster.start("engine")
    cluster.wait(job, "completed")
    cluster.until(lambda: "batchsvc_worker_units" in scraper.scrape().get(engine.name, ""), "the worker shows itself")
    cluster.until(lambda: _lines_ok(scraper) == 40, "the API has heard of the lines")
    texts = scraper.scrape()
    assert len(texts) == 3
    shown: set[str] = set()
    for text in texts.values():
        assert job.id not in text and job.canary not in text and cluster.project_id not in text and "c40" not in text
        for family in text_string_to_metric_families(text):
            name = family.name
            shown.add(name)
            assert re.fullmatch(r"batchsvc_[a-z0-9_]+", name), name
            assert family.documentation.endswith("."), name
            assert family.type in ("counter", "gauge", "histogram"), f"{name} is {family.type}"
            assert not re.search(r"_(ms|s|millis|kb|mb|percent|tps)$", name), f"{name}: base units"
            if family.type == "histogram":
                assert name.endswith(UNITS)
            for sample in family.samples:
                shown.add(sample.name)
                assert (family.type == "counter") == sample.name.endswith("_total"), sample.name
                for label, value in sample.labels.items():
                    allowed = CLOSED[label]
                    assert allowed is None or value in allowed, f"{sample.name}: {label}={value}"
    named = {name for alert in ALERTS for name in names_in(alert.expr)} - {"up"}
    named |= {name for panel in dashboard.PANELS for expr, _ in panel.lines for name in names_in(expr)}
    named |= set(re.findall(r"batchsvc_[a-z_]*[a-z]\b(?!_)", README.read_text(encoding="utf-8")))
    assert named <= shown, f"nobody shows {named - shown}"
    firing = {alert.name: scraper.firing(alert.name) for alert in ALERTS}
    assert not any(firing.values()), f"nothing is wrong, and yet {firing}"
    for process in cluster.processes:
        ready = cluster.http.get(f"{process.signals}/readyz").json()
        assert (ready["status"], cluster.http.get(f"{process.signals}/livez").status_code) == ("ready", 200)


def _lines_ok(scraper: Scraper) -> float:
    found = scraper.prometheus.query('sum(batchsvc_lines_total{outcome="ok"})', scraper.now_s())
    scraper.scrape()
    return next(iter(found.values()), 0.0)


def test_row_25_no_worker_for_work(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    cluster.start("control")
    job = cluster.submit(20)
    scraper.fires("BatchsvcNoWorker")
    (labels,) = scraper.firing("BatchsvcNoWorker")
    assert dict(labels) == {"model": MODEL, "model_digest": cluster.model.digest}
    cluster.start("engine")
    scraper.is_quiet("BatchsvcNoWorker")
    cluster.wait(job, "completed")
    judge(job)


def test_row_10_a_killed_workers_leases_are_lost(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    cluster.start("control")
    victim = cluster.start("engine", failpoints="lines.finished=kill@3")
    job = cluster.submit(60)
    scraper.is_quiet("BatchsvcLeasesLost")
    victim.died()
    scraper.fires("BatchsvcTargetDown")
    scraper.fires("BatchsvcLeasesLost")
    scraper.forget(victim)
    cluster.start("engine")
    cluster.wait(job, "completed")
    scraper.wait_s(16 * 60)
    scraper.is_quiet("BatchsvcLeasesLost")
    scraper.is_quiet("BatchsvcTargetDown")
    judge(job)


def test_row_58_a_finalizer_that_is_stuck(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    victim = cluster.start("control", failpoints="window.merged=kill")
    cluster.start("engine")
    job = cluster.submit(20)
    victim.died()
    scraper.is_quiet("BatchsvcBatchStuck")
    long_ago(cluster, job, "finalizing_ms")
    scraper.fires("BatchsvcBatchStuck")
    assert [dict(labels) for labels in scraper.firing("BatchsvcBatchStuck")] == [{"state": "finalizing"}]
    cluster.start("control")
    cluster.wait(job, "completed")
    scraper.is_quiet("BatchsvcBatchStuck")


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_row_6_the_reaper_is_gone(cluster: Cluster, scraper: Scraper) -> None:
    cluster.serve()
    victim = cluster.start("control")
    scraper.is_quiet("BatchsvcReaperStopped")
    victim.kill()
    scraper.forget(victim)
    scraper.is_quiet("BatchsvcReaperStopped")
    with cluster.db.transaction() as session:  # a reaper that lives would soon tick again
        aged = database_now_ms(session) - 130_000
        session.execute(update(Tally).where(Tally.name == "reaper_ticks").values(at_ms=aged))
    scraper.fires("BatchsvcReaperStopped")
    cluster.start("control")
    scraper.is_quiet("BatchsvcReaperStopped")


def test_row_27_redis_is_gone(cluster: Cluster, tmp_path: Path) -> None:
    valkey = OwnValkey(tmp_path)
    valkey.start()
    try:
        with closing(cluster.with_services(redis_url=valkey.url)) as own, closing(Scraper(own)) as scraper:
            api = own.serve()
            own.start("control")
            scraper.is_quiet("BatchsvcRedisDown")
            valkey.kill()
            scraper.fires("BatchsvcRedisDown")
            assert own.http.get(f"{api.signals}/readyz").json()["status"] == "degraded"
            valkey.start()
            scraper.is_quiet("BatchsvcRedisDown")
    finally:
        valkey.kill()


def test_row_39_the_store_fails(cluster: Cluster, scraper: Scraper) -> None:
    with s3_proxied(cluster) as proxy:
        cluster.serve()
        scraper.sees(worker := cluster.start("control"))
        scraper.is_quiet("BatchsvcStoreDown")
        proxy.refuse()
        scraper.fires("BatchsvcStoreDown")
        ready = cluster.http.get(f"{worker.signals}/readyz", timeout=30)
        assert ready.status_code == 503 and list(_broken(ready.json())) == ["store"]
        proxy.heal()
        scraper.is_quiet("BatchsvcStoreDown")


@pytest.mark.parametrize("weather", ["refuse", "black_hole"])
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_row_49_the_database_is_away_or_silent(cluster: Cluster, scraper: Scraper, weather: str) -> None:
    """The scrape itself still answers, soon enough for a scraper, and says so."""
    with database_proxied(cluster) as proxy:
        cluster.serve()
        scraper.sees(worker := cluster.start("control"))
        scraper.is_quiet("BatchsvcDatabaseDown")
        getattr(proxy, weather)()
        scraper.fires("BatchsvcDatabaseDown")
        for process in cluster.processes:
            assert cluster.http.get(f"{process.signals}/livez").status_code == 200
        ready = cluster.http.get(f"{worker.signals}/readyz")
        assert ready.status_code == 503 and "database" in _broken(ready.json())
        if weather == "refuse":
            assert {cluster.call("GET", "/v1/batches").status_code for _ in range(3)} == {503}
            scraper.fires("BatchsvcRequestsFail")
        proxy.heal()
        scraper.is_quiet("BatchsvcDatabaseDown")
        scraper.wait_s(6 * 60)
        scraper.is_quiet("BatchsvcRequestsFail")


def _broken(ready: dict[str, Any]) -> dict[str, str]:
    return {part: says for part, says in ready["parts"].items() if says != "ok"}


def test_row_64_a_webhook_receiver_is_down(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    with receiving() as receiver:
        receiver.statuses += [503] * 3
        listen(cluster, receiver.url)
        cluster.start("control", **LOOPBACK)
        cluster.start("engine")
        job = cluster.submit(20)
        cluster.wait(job, "completed")
        cluster.until(lambda: delivery(cluster), "it is to be told")
        scraper.is_quiet("BatchsvcWebhooksLate")
        with cluster.db.transaction() as session:
            for table in (WebhookEvent, WebhookDelivery):
                session.execute(update(table).values(created_ms=database_now_ms(session) - HOUR_MS))
        scraper.fires("BatchsvcWebhooksLate")

        def is_told() -> bool:
            hurry(cluster)
            made = delivery(cluster)
            return made is not None and made.state == "delivered"

        cluster.until(is_told, "the receiver is back")
        scraper.is_quiet("BatchsvcWebhooksLate")
    judge(job)


def test_row_62_a_deadline_is_at_risk(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    cluster.start("control")
    job = cluster.submit(20)
    cluster.wait(job, "in_progress")
    scraper.is_quiet("BatchsvcDeadlineAtRisk")
    with cluster.db.reading() as session:
        now = database_now_ms(session)
    cluster.change_batch(job, created_ms=now - 20 * HOUR_MS, expires_ms=now + 4 * HOUR_MS)
    scraper.fires("BatchsvcDeadlineAtRisk")
    (labels,) = scraper.firing("BatchsvcDeadlineAtRisk")
    tier, digest = cluster.batch(job).tier, cluster.model.digest
    assert dict(labels) == {"tier": tier, "model": MODEL, "model_digest": digest}
    cluster.start("engine")
    cluster.wait(job, "completed")
    scraper.is_quiet("BatchsvcDeadlineAtRisk")
    judge(job)


def test_row_20_a_poisoned_line(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    cluster.start("control")
    job = cluster.submit(0, lines=lines_with(cluster, 4, "poison", {3}))
    scraper.is_quiet("BatchsvcLineQuarantined")

    def has_ended() -> bool:
        if not cluster.alive("engine"):
            cluster.start("engine", BATCHSVC_FAKE_FAULTS="die:poison")
        scraper.scrape()
        return cluster.batch(job).status == "completed"

    cluster.until(has_ended, "the batch ends", 180)
    scraper.fires("BatchsvcLineQuarantined")
    scraper.wait_s(61 * 60)
    scraper.is_quiet("BatchsvcLineQuarantined")
    assert [line["line"] for line in judge(job, errors={"poison"}).errors] == [3]


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_a_ledger_that_differs(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    """One nano-dollar, found by the reaper's own sample, and put right again."""
    cluster.serve()
    planner = cluster.start("control", BATCHSVC_RECONCILE_S=0)
    cluster.start("engine")
    job = cluster.submit(10)
    cluster.wait(job, "completed")
    judge(job)
    cost_nanos = cluster.batch(job).cost_nanos
    cluster.change_batch(job, cost_nanos=cost_nanos + 1)
    scraper.is_quiet("BatchsvcLedgerDiffers")
    planner.kill()
    scraper.forget(planner)
    cluster.start("control", BATCHSVC_RECONCILE_S=0.2)
    scraper.fires("BatchsvcLedgerDiffers")
    cluster.change_batch(job, cost_nanos=cost_nanos)
    scraper.is_quiet("BatchsvcLedgerDiffers")


def test_row_43_damaged_results(cluster: Cluster, scraper: Scraper, judge: Judge) -> None:
    control = cluster.start("control")
    cluster.start("engine", BATCHSVC_FAKE_TOKENS_PER_S=300)
    job = cluster.submit(100)
    scraper.is_quiet("BatchsvcResultsDamaged")
    cluster.until(lambda: cluster.parts(job), "the first part")
    cluster.store.put(cluster.parts(job)[0].s3_key, b"not what it was")
    cluster.wait(job, "completed")
    scraper.fires("BatchsvcResultsDamaged")
    scraper.wait_s(61 * 60)
    scraper.is_quiet("BatchsvcResultsDamaged")
    assert control.is_alive
    judge(job, counts_may_fall=True)
