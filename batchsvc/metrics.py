"""What /metrics shows, in Prometheus' text format: read from SQL at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchsvc.batches import finalize_queries, queries, reconcile_sample_queries, scaling_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.offpeak import Night
from batchsvc.db.session import Database
from batchsvc.engine_metrics import EngineMetrics
from batchsvc.settings import Settings

_MODEL_LABELS = ("model", "model_digest")


class SqlGauges(Collector):
    """State of the whole deployment; every API process shows the same."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db, self._renew_s = db, settings.renew_s
        self._night = Night.from_settings(settings)

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing, so that registering reads no database."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._db.reading() as session:
            statuses = queries.batches_by_status(session)
            damaged = finalize_queries.damaged_parts(session)
            added_up, differences = reconcile_sample_queries.counts(session)
            demands = scaling_queries.demands(session, self._night, self._renew_s)
        batches = GaugeMetricFamily("batchsvc_batches", "Batches by status.", labels=["status"])
        for status in Status:
            batches.add_metric([status], statuses.get(status, 0))
        units = GaugeMetricFamily(
            "batchsvc_units_claimable", "Units that a worker could claim now.", labels=_MODEL_LABELS
        )
        backlog = GaugeMetricFamily(
            "batchsvc_backlog_seconds", "Time that one worker alone would need for what may run.", labels=_MODEL_LABELS
        )
        live = GaugeMetricFamily("batchsvc_workers_live", "Engine workers that are alive.", labels=_MODEL_LABELS)
        for demand in demands:
            labels = [demand.model, demand.digest]
            units.add_metric(labels, demand.units_claimable)
            backlog.add_metric(labels, demand.backlog_seconds)
            live.add_metric(labels, demand.workers)
        yield from (batches, units, backlog, live)
        yield CounterMetricFamily(
            "batchsvc_parts_damaged", "Results found missing or damaged, whose lines were run again.", value=damaged
        )
        yield CounterMetricFamily(
            "batchsvc_batches_reconciled", "Ended batches that the reaper has added up again.", value=added_up
        )
        yield CounterMetricFamily(
            "batchsvc_reconcile_differences", "Numbers that differed when batches were added up.", value=differences
        )


class Metrics:
    """The registry of one process."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(SqlGauges(db, settings))
        self._registry.register(EngineMetrics(db, settings.renew_s))

    def text(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)
