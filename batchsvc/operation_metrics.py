"""What /metrics shows an operator of the whole deployment: what waits, how near deadlines are, what doesn't get on.

Every API process shows the same numbers, so rules take the largest or smallest over processes, never their sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy.orm import Session

from batchsvc.batches import queries, reconcile_sample_queries, signal_queries, tally_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.offpeak import Night
from batchsvc.batches.tally_queries import Tallied, TallyName
from batchsvc.db.session import Database, database_now_ms
from batchsvc.settings import Settings
from batchsvc.webhooks import queries as webhook_queries

_MODEL_LABELS = ("model", "model_digest")
_PASSING = (Status.VALIDATING, Status.FINALIZING, Status.CANCELLING)
_TALLIES: dict[TallyName, tuple[str, str]] = {
    "reaper_ticks": ("batchsvc_reaper_ticks", "Ticks of the reapers of all control processes."),
    "leases_lost": ("batchsvc_leases_lost", "Leases of units that ran out, because their worker died or was cut off."),
    "parts_damaged": ("batchsvc_parts_damaged", "Results found missing or damaged, whose lines were run again."),
    "lines_quarantined": ("batchsvc_lines_quarantined", "Lines that ended engines again and again, so none runs them."),
}
_FAR_S = 10.0 * 365 * 86_400  # slack of a deployment in which nothing runs


class OperationMetrics(Collector):
    """Reads SQL alone, at each scrape."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db = db
        self._night = Night.from_settings(settings)

    def describe(self) -> list[Metric]:
        """Nothing, so that registering reads no database."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._db.reading() as session:
            yield from list(self._look(session))

    def _look(self, session: Session) -> Iterator[Metric]:
        now = database_now_ms(session)
        names = queries.labels_by_digest(session)
        yield from self._units(session, names, now)
        yield _slack(session, names, now)
        yield _passing(session, now)
        yield from _tallies(tally_queries.all_of(session))
        unsent, unsaved = webhook_queries.oldest_unsent_ms(session), signal_queries.oldest_export_ms(session)
        yield _age("batchsvc_outbox_age_seconds", "Age of the oldest event that a webhook waits for.", unsent, now)
        yield _age("batchsvc_export_age_seconds", "Age of the oldest results that wait for a store.", unsaved, now)
        paused = GaugeMetricFamily("batchsvc_batches_paused", "Batches paused by an operator, or for their crashes.")
        paused.add_metric([], signal_queries.paused(session))
        yield paused
        holds = GaugeMetricFamily(
            "batchsvc_claim_holds",
            "Orders of an operator that nothing new is claimed, by what they are about.",
            labels=["kind"],
        )
        for kind, num in signal_queries.holds(session).items():
            holds.add_metric([kind], num)
        yield holds
        audits = reconcile_sample_queries.counts(session)
        yield CounterMetricFamily(
            "batchsvc_batches_reconciled", "Ended batches that the reaper has added up again.", value=audits.batches
        )
        yield GaugeMetricFamily(
            "batchsvc_reconcile_differences",
            "Numbers that differ in batches, as they were added up last.",
            value=audits.differences,
        )
        yield GaugeMetricFamily(
            "batchsvc_unreconciled_nanos",
            "Nano-dollars by which amounts differ: the most of each batch, added up.",
            value=audits.unreconciled_nanos,
        )

    def _units(self, session: Session, names: dict[str, str], now: int) -> Iterator[Metric]:
        held = signal_queries.held(session)
        oldest = signal_queries.oldest_claimable_ms(session, now, is_night=self._night.is_open(now))
        leased = GaugeMetricFamily("batchsvc_units_leased", "Units that workers have.", labels=_MODEL_LABELS)
        suspect = GaugeMetricFamily(
            "batchsvc_units_suspect", "Units that run alone, since engines crashed with them.", labels=_MODEL_LABELS
        )
        age = GaugeMetricFamily(
            "batchsvc_claimable_age_seconds", "How long the oldest claimable work has waited.", labels=_MODEL_LABELS
        )
        for digest, name in names.items():
            labels = (name, digest)
            units = held.get(digest, signal_queries.Held(0, 0))
            leased.add_metric(labels, units.leased)
            suspect.add_metric(labels, units.suspect)
            age.add_metric(labels, max(0, now - oldest.get(digest, now)) / 1000)
        yield from (leased, suspect, age)


def _slack(session: Session, names: dict[str, str], now: int) -> Metric:
    slack = GaugeMetricFamily(
        "batchsvc_deadline_slack_seconds",
        "Time left until the first running batch becomes late: below 0 it may miss its deadline.",
        labels=("tier", *_MODEL_LABELS),
    )
    found = signal_queries.nearest_latest_start_ms(session)
    for (tier, digest), at_ms in found.items():
        slack.add_metric((tier, names.get(digest, ""), digest), (at_ms - now) / 1000)
    if not found:  # a rule must see that there is nothing to fear
        slack.add_metric(("", "", ""), _FAR_S)
    return slack


def _passing(session: Session, now: int) -> Metric:
    age = GaugeMetricFamily(
        "batchsvc_state_age_seconds", "How long a batch is already in a state that should pass.", labels=("state",)
    )
    since = signal_queries.waiting_since_ms(session, now)
    for status in _PASSING:
        age.add_metric([status], max(0, now - since.get(status, now)) / 1000)
    return age


def _tallies(found: dict[str, Tallied]) -> Iterator[Metric]:
    for name, (shown, says) in _TALLIES.items():
        yield CounterMetricFamily(shown, says, value=found.get(name, Tallied(0, 0)).num)
    yield GaugeMetricFamily(
        "batchsvc_reaper_last_tick_timestamp_seconds",
        "When a reaper last ended a tick, by the database's clock.",
        value=found.get("reaper_ticks", Tallied(0, 0)).at_ms / 1000,
    )


def _age(name: str, says: str, since_ms: int | None, now: int) -> Metric:
    return GaugeMetricFamily(name, says, value=0 if since_ms is None else max(0, now - since_ms) / 1000)
