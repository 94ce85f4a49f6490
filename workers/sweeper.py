"""The sweeper: a thread of a control process for all that deletes in the store, so that a slow store delays no repair.

    garbage    objects that were marked and are due
    purges     what was deleted is wiped out of every store, round after round while there is more
    audit      now and then the bucket is walked for objects that nobody refers to

A tick of the reaper wakes it. Each step is right to repeat and right to run in several processes at once.
"""

from __future__ import annotations

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import counters, logs
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from batchsvc.threads import WokenThread
from workers.garbage import Collector
from workers.purge import Purger

log = structlog.get_logger(__name__)


class Sweeper:
    """The sweeper of one control process. `wake` is for every tick, `sweep` does what is due here and now."""

    def __init__(self, settings: Settings, db: Database, store: ObjectStore) -> None:
        self._thread = WokenThread("sweeper", self.sweep)
        self._stopped = self._thread.stopped
        self._collector = Collector(settings, db, store, self._stopped.is_set)
        self._purger = Purger(settings, db, self._collector, self._stopped.is_set)
        self._audit_period_s = settings.garbage_grace_s / 4
        self._next_audit_s = monotonic_s() + self._audit_period_s

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look for what is due. Returns at once."""
        self._thread.wake()

    def stop(self) -> None:
        """End when the object that is on its way out has gone."""
        self._thread.stop()

    def sweep(self) -> None:
        """All steps, again while purges are left. A step that fails is logged, and the others still run."""
        while True:
            for step in (self._garbage, self._purges, self._audit_now_and_then):
                if self._stopped.is_set():
                    return
                try:
                    step()
                except (ServiceError, DBAPIError, OSError) as error:
                    counters.REAPER_STEP_FAILURES.inc()
                    log.warning("sweeper.failed", step=step.__name__.strip("_"), **logs.where(error))
            if not self._purger.is_behind:
                return

    def audit(self) -> int:
        """Delete old objects that nobody refers to; see garbage.py."""
        return self._collector.audit()

    def num_overdue(self) -> int:
        """How many things should be gone by now that aren't."""
        return self._purger.num_overdue()

    def _garbage(self) -> None:
        self._collector.delete_due()

    def _purges(self) -> None:
        self._purger.purge_due()

    def _audit_now_and_then(self) -> None:
        if monotonic_s() >= self._next_audit_s:
            self._next_audit_s = monotonic_s() + self._audit_period_s
            self._purger.adopt()
            if deleted := self.audit():
                log.info("store.audited", deleted=deleted)
