"""What this process has counted since it started, for /metrics; whoever does the work counts it here.

Labels take values from the closed sets below alone: never a project, a batch or a custom_id, which would make a series
for each.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics

_without_times_of_creation: Callable[[], None] = disable_created_metrics
_without_times_of_creation()  # a second series for each counter, which nobody reads

REGISTRY = CollectorRegistry()
TASKS = ("batch.plan", "batch.finalize", "quote.plan", "unit.run")
TASK_OUTCOMES = ("done", "failed", "crashed")
UNRUN = ("rejected", "cancelled", "expired", "lost")
REAPER_STEP_FAILURES = Counter(
    "batchsvc_reaper_step_failures", "Steps of this reaper's ticks that failed.", registry=REGISTRY
)
TASK_RUNS = Counter("batchsvc_tasks", "Celery tasks by how they ended.", ["task", "outcome"], registry=REGISTRY)
HINTS_DROPPED = Counter(
    "batchsvc_hints_dropped", "Messages that Redis didn't take; the reaper sends them again.", registry=REGISTRY
)
LINES_UNRUN = Counter("batchsvc_unrun_lines", "Lines that ended without a run, by why.", ["outcome"], registry=REGISTRY)
for _task in TASKS:  # from the start on: a rule sees growth only of a series that was there before
    for _outcome in TASK_OUTCOMES:
        TASK_RUNS.labels(_task, _outcome)
for _outcome in UNRUN:
    LINES_UNRUN.labels(_outcome)
