"""What /metrics shows of the engines: histograms and counts by model and lane, added up from workers' heartbeats.

A counter of Prometheus must not fall when a worker ends, so each API process adds up by how much each worker's own
counts grew since it last looked. A worker shows its own numbers under names of their own (`batchsvc_worker_...`), so
that a sum over all processes counts nothing twice.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from batchsvc.batches import queries, worker_queries
from batchsvc.batches.engine_view import LANES
from batchsvc.batches.tables import Worker
from batchsvc.batches.waiting import alive_since_ms
from batchsvc.db.session import Database

_MODEL_LABELS = ("model", "model_digest")
_LANE_LABELS = (*_MODEL_LABELS, "lane")
_TOKENS = {
    "prompt_tokens": "Prompt tokens of the requests that came in.",
    "hit_tokens": "Prompt tokens that the prefix cache held.",
    "computed_tokens": "Tokens computed, again or not.",
    "output_tokens": "Tokens generated.",
}
_LINES = ("ok", "error")
_LINE_TOKENS = ("input", "cached", "output")
_TIMES = {
    "ttft": ("ttft_seconds", "Time from a request's arrival in the engine to its first token."),
    "gaps": ("inter_token_seconds", "Time between two tokens of an answer."),
    "speeds": ("answer_tokens_per_second", "Speed of answers, each over its tokens after the first."),
}
_UNITS = {"speeds": "tps"}  # of the bounds and the sum, where they aren't seconds
_KNOWN_WORKERS = 10_000  # that may come back
_STEPS = ("step_seconds", "Time of an engine's step.")
_DEPLOYMENT, _WORKER = "batchsvc_", "batchsvc_worker_"


class Series(NamedTuple):
    """What one number counts. `bound` is that of a histogram's bucket, None of its sum or of a plain count."""

    name: str
    labels: tuple[str, ...]
    bound: float | None = None


class Growth:
    """Adds up counts of workers that come and go, so that no sum ever falls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, Mapping[Series, float]] = {}
        self._totals: defaultdict[Series, float] = defaultdict(float)

    def look(self, counts: Mapping[str, Mapping[Series, float]]) -> dict[Series, float]:
        """The sums, now that the workers have these counts since their starts. One that is away for a while and comes
        back counts from where it was."""
        with self._lock:
            for worker_id, own in counts.items():
                before = self._last.pop(worker_id, {})
                for series, count in own.items():
                    self._totals[series] += max(count - before.get(series, 0.0), 0.0)
                # of two looks at once the older one may come last
                self._last[worker_id] = {**before, **{name: max(n, before.get(name, n)) for name, n in own.items()}}
            while len(self._last) > _KNOWN_WORKERS:
                del self._last[next(iter(self._last))]
            return dict(self._totals)


class EngineMetrics(Collector):
    """Every API process shows the same gauges; its counters count since it looked first."""

    def __init__(self, db: Database, renew_s: float) -> None:
        self._db, self._renew_s = db, renew_s
        self._growth = Growth()

    def describe(self) -> list[Metric]:
        """Nothing, so that registering reads no database."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._db.reading() as session:
            names = queries.labels_by_digest(session)
            workers = worker_queries.alive(session, alive_since_ms(session, self._renew_s))
        said = [(worker, _labels(worker, names), dict(worker.stats or {})) for worker in workers]
        yield from _gauges([(labels, stats) for _, labels, stats in said], _DEPLOYMENT)
        sums = self._growth.look({worker.id: counts_of(stats, labels) for worker, labels, stats in said})
        yield from _counters(sums, _DEPLOYMENT)


def of_worker(stats: Mapping[str, Any], model: tuple[str, str]) -> Iterator[Metric]:
    """What one worker shows of itself; `model` is the name and the digest of what it serves."""
    yield from _gauges([(model, stats)], _WORKER)
    yield from _counters(counts_of(stats, model), _WORKER)
    yield GaugeMetricFamily("batchsvc_worker_units", "Units that this worker has.", value=stats.get("units", 0))
    yield GaugeMetricFamily(
        "batchsvc_worker_buffered_bytes",
        "Finished lines that wait for their part.",
        value=stats.get("buffered_bytes", 0),
    )
    lost = CounterMetricFamily(
        "batchsvc_worker_leases_lost", "Leases that this worker gave up or was robbed of.", labels=("outcome",)
    )
    for outcome, num in (stats.get("leases_lost") or {}).items():
        lost.add_metric([outcome], num)
    yield lost


def counts_of(stats: Mapping[str, Any], model: tuple[str, ...]) -> dict[Series, float]:
    """All that a worker counts since its start, as plain numbers."""
    found: dict[Series, float] = {Series("busy", model): stats.get("busy_ms", 0) / 1000}
    ended = stats.get("ended") or {}
    found |= {Series("lines", (*model, outcome)): ended.get(outcome, 0) for outcome in _LINES}
    found |= {Series("line_tokens", (*model, kind)): ended.get(f"{kind}_tokens", 0) for kind in _LINE_TOKENS}
    for lane in LANES:
        said = dict(stats.get("lanes") or {}).get(lane) or {}
        labels = (*model, lane)
        found |= {Series(name, labels): said.get(name, 0) for name in _TOKENS}
        for name in _TIMES:
            found |= _times(name, labels, said.get(name) or {})
    return found | _times("steps", model, stats.get("step_times") or {})


def _times(name: str, labels: tuple[str, ...], said: Mapping[str, Any]) -> dict[Series, float]:
    unit = _UNITS.get(name, "s")
    bounds = [*said.get(f"bounds_{unit}", ()), math.inf]
    found: dict[Series, float] = {
        Series(name, labels, bound): count for bound, count in zip(bounds, said.get("counts", ()), strict=False)
    }
    return found | {Series(name, labels): said.get(f"sum_{unit}", 0.0)} if found else {}


def _counters(sums: Mapping[Series, float], prefix: str) -> Iterator[Metric]:
    shown = {
        **{name: (name, says, _LANE_LABELS) for name, says in _TOKENS.items()},
        "busy": ("engine_busy_seconds", "Time that engines computed.", _MODEL_LABELS),
        "lines": ("lines", "Lines that workers ended, by how.", (*_MODEL_LABELS, "outcome")),
        "line_tokens": ("line_tokens", "Tokens of the lines that ended, as billed.", (*_MODEL_LABELS, "kind")),
    }
    for name, (ending, says, labels) in shown.items():
        family = CounterMetricFamily(prefix + ending, says, labels=labels)
        for series in _of(sums, name):
            family.add_metric(series.labels, sums[series])
        yield family
    for name, (ending, says) in _TIMES.items():
        yield _histogram(HistogramMetricFamily(prefix + ending, says, labels=_LANE_LABELS), sums, name)
    ending, says = _STEPS
    yield _histogram(HistogramMetricFamily(prefix + ending, says, labels=_MODEL_LABELS), sums, "steps")


def _of(sums: Mapping[Series, float], name: str) -> Iterator[Series]:
    """The counts of this name, or the sums of its histograms."""
    return (series for series in sums if series.name == name and series.bound is None)


def _histogram(family: HistogramMetricFamily, sums: Mapping[Series, float], name: str) -> HistogramMetricFamily:
    for total in _of(sums, name):
        bounds = sorted(s.bound for s in sums if s[:2] == total[:2] and s.bound is not None)
        below, buckets = 0.0, []
        for bound in bounds:
            below += sums[Series(name, total.labels, bound)]
            buckets.append(("+Inf" if math.isinf(bound) else str(bound), below))
        family.add_metric(total.labels, buckets=buckets, sum_value=sums[total])
    return family


def _gauges(said: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]], prefix: str) -> Iterator[Metric]:
    running = GaugeMetricFamily(f"{prefix}requests_running", "Sequences that run in engines.", labels=_LANE_LABELS)
    waiting = GaugeMetricFamily(f"{prefix}requests_waiting", "Sequences that wait in engines.", labels=_LANE_LABELS)
    speed = GaugeMetricFamily(
        f"{prefix}output_tokens_per_second", "Tokens generated, over the last ten seconds.", labels=_LANE_LABELS
    )
    lanes: defaultdict[tuple[str, ...], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    models: defaultdict[tuple[str, ...], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for labels, stats in said:
        for lane in LANES:
            own = dict(stats.get("lanes") or {}).get(lane) or {}
            for name in ("running", "waiting", "output_tps"):
                lanes[*labels, lane][name] += own.get(name, 0)
        for name in ("used_blocks", "num_blocks", "hit_tokens", "prompt_tokens"):
            models[labels][name] += stats.get(name, 0)
    for labels, own in lanes.items():
        running.add_metric(labels, own["running"])
        waiting.add_metric(labels, own["waiting"])
        speed.add_metric(labels, own["output_tps"])
    kv = GaugeMetricFamily(f"{prefix}kv_used_ratio", "Share of the KV blocks that are in use.", labels=_MODEL_LABELS)
    hits = GaugeMetricFamily(
        f"{prefix}prefix_hit_ratio", "Share of all prompt tokens that the prefix cache held.", labels=_MODEL_LABELS
    )
    for labels, own in models.items():
        kv.add_metric(labels, own["used_blocks"] / max(own["num_blocks"], 1.0))
        hits.add_metric(labels, own["hit_tokens"] / max(own["prompt_tokens"], 1.0))
    yield from (running, waiting, speed, kv, hits)


def _labels(worker: Worker, names: Mapping[str, str]) -> tuple[str, ...]:
    return (names.get(worker.model_digest, ""), worker.model_digest)
