"""Plans what has to be copied from a tenant's store first, on threads of its own: a slow store holds up no planner.

A project has one input on its way at a time. Whoever finds no room here is sent again by the reaper, and what is copied
when the process ends is let go of: another one copies it again, and plans it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from batchsvc import logs

_THREADS = 4

log = structlog.get_logger(__name__)


class Importer:
    """The importers of one control process."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._projects: set[str] = set()  # whose input is on its way
        self._is_stopped = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="import")

    @property
    def is_stopped(self) -> bool:
        """Whether work that is under way should end soon."""
        return self._is_stopped

    def take(self, project_id: str, work: Callable[[], object]) -> bool:
        """Have this done for a project, soon. False: not now."""
        with self._lock:
            if self._is_stopped or project_id in self._projects or len(self._projects) >= self._threads:
                return False
            self._projects.add(project_id)
            self._pool.submit(self._do, project_id, work)
        return True

    def stop(self) -> None:
        """End when what is on its way has let go."""
        with self._lock:
            self._is_stopped = True
        self._pool.shutdown()

    def _do(self, project_id: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # its lease ends, and the reaper brings it again
            log.warning("import.broken", **logs.where(error))
        finally:
            with self._lock:
                self._projects.discard(project_id)
