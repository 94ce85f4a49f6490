"""What this process has counted since it started, for /metrics; whoever does the work counts it here.

Labels take values from the closed sets below alone: never a project, a batch or a custom_id, which would make a series
for each.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

_without_times_of_creation: Callable[[], None] = disable_created_metrics
_without_times_of_creation()  # a second series for each counter, which nobody reads

REGISTRY = CollectorRegistry()
TASKS = ("batch.plan", "batch.finalize", "quote.plan", "unit.run")
TASK_OUTCOMES = ("done", "failed", "crashed")
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
UNRUN = ("rejected", "cancelled", "expired", "lost")
REAPER_STEP_FAILURES = Counter(
    "batchsvc_reaper_step_failures", "Steps of this reaper's ticks that failed.", registry=REGISTRY
)
TASK_RUNS = Counter("batchsvc_tasks", "Celery tasks by how they ended.", ["task", "outcome"], registry=REGISTRY)
HINTS_DROPPED = Counter(
    "batchsvc_hints_dropped", "Messages that Redis didn't take; the reaper sends them again.", registry=REGISTRY
)
LINES_UNRUN = Counter("batchsvc_unrun_lines", "Lines that ended without a run, by why.", ["outcome"], registry=REGISTRY)
REQUESTS = Counter(
    "batchsvc_http_requests", "HTTP requests served, by the class of their status.", ["outcome"], registry=REGISTRY
)
REQUEST_SECONDS = Histogram(
    "batchsvc_http_request_seconds",
    "Time from a request's arrival to the end of its response.",
    registry=REGISTRY,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
for _class in STATUS_CLASSES:
    REQUESTS.labels(_class)
for _task in TASKS:  # from the start on: a rule sees growth only of a series that was there before
    for _outcome in TASK_OUTCOMES:
        TASK_RUNS.labels(_task, _outcome)
for _outcome in UNRUN:
    LINES_UNRUN.labels(_outcome)
