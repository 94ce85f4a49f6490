"""What /metrics shows, in Prometheus' text format: gauges that are read from SQL at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from batchsvc.batches import queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.waiting import alive_since_ms
from batchsvc.db.session import Database


class SqlGauges(Collector):
    """State of the whole deployment; every API process shows the same."""

    def __init__(self, db: Database, renew_s: float) -> None:
        self._db, self._renew_s = db, renew_s

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing, so that registering reads no database."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._db.reading() as session:
            statuses = queries.batches_by_status(session)
            claimable = unit_queries.claimable_by_model(session)
            workers = queries.live_workers_by_model(session, alive_since_ms(session, self._renew_s))
        batches = GaugeMetricFamily("batchsvc_batches", "Batches by status.", labels=["status"])
        for status in Status:
            batches.add_metric([status], statuses.get(status, 0))
        yield batches
        units = GaugeMetricFamily(
            "batchsvc_units_claimable", "Units that a worker could claim.", labels=["model_digest"]
        )
        for digest, number in claimable.items():
            units.add_metric([digest], number)
        yield units
        live = GaugeMetricFamily("batchsvc_workers_live", "Engine workers that are alive.", labels=["model_digest"])
        for digest, number in workers.items():
            live.add_metric([digest], number)
        yield live


class Metrics:
    """The registry of one process."""

    def __init__(self, db: Database, renew_s: float) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(SqlGauges(db, renew_s))

    def text(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)
