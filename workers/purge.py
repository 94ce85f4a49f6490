"""Wipes what was deleted out of every store: the rows first, then the objects that nobody refers to any more.

Each purge (files/purge_queries.py) is done twice: soon after the deletion, and once more when nobody who didn't notice
can write any more. Every step may be repeated: a collector that is killed leaves a purge that another one takes again.
While somebody holds the collection of garbage, purges wait. A round ends when the store doesn't answer, which takes a
minute to find out: the purges of that round that weren't begun are due again at once.

On SQLite, what a row held would still stand in the write-ahead log; after a round of purges it is written back and cut
off. (`secure_delete`, which db/session.py sets, fills freed bytes in the file itself with zeros.)
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import failpoints, logs
from batchsvc.batches import collection_queries, wipe_queries
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError, UnavailableError
from batchsvc.files import purge_queries
from batchsvc.files.purge_queries import DuePurge
from batchsvc.files.retention import Policy
from batchsvc.settings import Settings
from batchsvc.store.s3 import OBJECTS_KEPT
from workers.garbage import Collector

_AT_ONCE = 50

log = structlog.get_logger(__name__)


class _AwayError(Exception):
    """The store doesn't answer, or does nothing now."""


class Purger:
    """The purges of one control process; several at once do no harm. `is_stopping` ends a round; `is_behind` says that
    the last one has left something that is due."""

    def __init__(
        self,
        settings: Settings,
        db: Database,
        collector: Collector,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._policy = Policy.of(settings.retention_grace_s, settings.lease_s)
        self._db = db
        self._collector = collector
        self._is_stopping = is_stopping
        self._is_log_clean = True
        self.is_behind = False

    def purge_due(self) -> int:
        """Wipe what is due, a bounded number at once. Returns how many things were wiped."""
        self.is_behind = False
        with self._db.reading() as session:
            if collection_queries.holds(session):
                return 0
        due = self._db.run(lambda session: purge_queries.take(session, self._policy, _AT_ONCE))
        wiped, left = 0, list(due)
        is_away = False
        while left and not is_away and not self._is_stopping():
            try:
                wiped += self._purge(left.pop(0))
            except _AwayError:
                is_away = True
        if left:
            self._db.run(lambda session: purge_queries.give_back(session, left))
        if due and not is_away:
            with self._db.reading() as session:
                self.is_behind = purge_queries.is_due(session)
        if wiped or not self._is_log_clean:
            self._is_log_clean = self._db.truncate_log()
        return wiped

    def adopt(self) -> None:
        """Look for what was deleted without asking for it to be wiped; now and then, as it reads all rows."""
        if adopted := self._db.run(wipe_queries.adopt):
            log.info("purges.adopted", purges=adopted)

    def num_overdue(self) -> int:
        """How many things should be gone by now that aren't."""
        with self._db.reading() as session:
            return purge_queries.overdue(session, self._policy)

    def _purge(self, purge: DuePurge) -> bool:
        try:
            prefixes = self._db.run(lambda session: wipe_queries.wipe(session, purge.kind, purge.subject_id))
            failpoints.reach("purge.rows_wiped")
            if not all(self._collector.sweep(prefix) for prefix in prefixes):
                return False  # held since: it is due again by itself
            failpoints.reach("purge.objects_gone")
            self._db.run(lambda session: purge_queries.note_wiped(session, purge, self._policy))
        except (ServiceError, DBAPIError, OSError) as error:
            log.warning("purge.failed", kind=purge.kind, subject=purge.subject_id, **logs.where(error))
            self._db.run(lambda session: purge_queries.note_failure(session, purge))
            if isinstance(error, UnavailableError) and error.code != OBJECTS_KEPT:
                raise _AwayError from error
            return False
        if purge.is_last:
            log.info("purge.done", kind=purge.kind, subject=purge.subject_id)
        return True
