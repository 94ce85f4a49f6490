"""A task as whoever runs it needs it: counted by how it ended, and its defects logged and never passed on.

Celery's threads and the reaper run the same tasks. A defect, or data that nobody expected, belongs to one batch: it
must cost no other its turn.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import counters, logs
from batchsvc.errors import ServiceError

log = structlog.get_logger(__name__)


def guarded(name: str, do: Callable[..., object]) -> Callable[..., None]:
    """The same task. Raises ServiceError and DBAPIError alone: something is away, for others too."""

    def task(*args: str) -> None:
        try:
            do(*args)
        except (ServiceError, DBAPIError):
            counters.TASK_RUNS.labels(name, "failed").inc()
            raise
        except Exception as error:  # a defect of ours, or damaged objects: never a traceback with contents
            counters.TASK_RUNS.labels(name, "crashed").inc()
            log.warning("task.crashed", task=name, **logs.where(error))
        else:
            counters.TASK_RUNS.labels(name, "done").inc()

    return task
