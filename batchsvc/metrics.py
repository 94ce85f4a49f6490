"""What /metrics shows, in Prometheus' text format: of the process that is asked, and, from the API, of the deployment.

What is read from SQL is left out while the database doesn't answer, so that a scrape still tells that it doesn't.
"""

from __future__ import annotations

from collections.abc import Iterator

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, TimeoutError

from batchsvc import counters
from batchsvc.batches import queries, scaling_queries, switch_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.offpeak import Night
from batchsvc.batches.waiting import alive_since_ms
from batchsvc.db.session import Database
from batchsvc.engine_metrics import EngineMetrics
from batchsvc.health import OK, Checks, Health, HealthMetrics
from batchsvc.operation_metrics import OperationMetrics
from batchsvc.settings import Settings

_AWAY = (OperationalError, InterfaceError, InternalError, TimeoutError)
_MODEL_LABELS = ("model", "model_digest")

log = structlog.get_logger(__name__)


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
            demands = scaling_queries.demands(session, self._night, self._renew_s)
            names = queries.labels_by_digest(session)
            since_ms = alive_since_ms(session, self._renew_s)
            able = switch_queries.able(session, since_ms, with_draining=True)  # whoever drained them knows (alerts.py)
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
        serving = GaugeMetricFamily(
            "batchsvc_workers_serving",
            "Engine workers that are alive and serve the model, now or in turn with others, be they drained.",
            labels=_MODEL_LABELS,
        )
        for demand in demands:
            labels = [names.get(demand.digest, ""), demand.digest]
            units.add_metric(labels, demand.units_claimable)
            backlog.add_metric(labels, demand.backlog_seconds)
            live.add_metric(labels, demand.workers)
            serving.add_metric(labels, len(able.get(demand.digest, ())))
        yield from (batches, units, backlog, live, serving)


class ProcessMetrics:
    """What every process shows of itself: its parts, what it has counted, and what it takes of its machine."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="batchsvc", registry=self.registry)

    def text(self) -> bytes:
        """All metrics as text. Never raises for a part that is away."""
        return self._text(self._checks.look())

    def _text(self, health: Health) -> bytes:
        own = CollectorRegistry()
        own.register(HealthMetrics(health))
        return b"".join(map(generate_latest, (own, self.registry, counters.REGISTRY)))


class Metrics(ProcessMetrics):
    """What an API process shows: itself, and the deployment."""

    def __init__(self, db: Database, settings: Settings, checks: Checks) -> None:
        super().__init__(checks)
        self._deployment = CollectorRegistry()
        self._deployment.register(SqlGauges(db, settings))
        self._deployment.register(OperationMetrics(db, settings))
        self._deployment.register(EngineMetrics(db, settings.renew_s))

    def _text(self, health: Health) -> bytes:
        own = super()._text(health)
        if health.parts["database"] != OK:
            return own
        try:
            return own + generate_latest(self._deployment)
        except _AWAY as error:  # it went away just now: the next scrape says so
            log.warning("metrics.not_read", error=type(error).__name__)
            return own
