"""Deletes objects that nobody needs: those that were marked, and those that an audit of the bucket finds.

Dead attempts leave objects that no row names: parts that never counted, files of an overtaken planner, results of an
overtaken finalizer, saved sequences, inputs and parts of uploads of an API process that died, and multipart uploads
of the store that nobody completes.
The audit walks the bucket and takes what is older than the grace and not referred to (garbage_queries tells what is).

What was written may yet be about to count: its writer stores it first and commits its row then. The commit is fenced
by a lease, so nothing can count that is older than the longest lease and what a worker believes of it: the grace is
more than two leases (settings check it), by default a day. What was marked is looked at once more before it goes.

While somebody holds the collection (collection_queries), as a backup does, nothing goes; it goes after that.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import structlog

from batchsvc.batches import collection_queries, garbage_queries
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore

_AT_ONCE = 500
_PREFIXES = (keys.BATCHES, keys.INPUTS, keys.UPLOADS)

log = structlog.get_logger(__name__)


class Collector:
    """The garbage collection of one control process; several at once do no harm. `is_stopping` ends a walk."""

    def __init__(
        self, settings: Settings, db: Database, store: ObjectStore, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._grace_ms = round(settings.garbage_grace_s * 1000)
        self._db = db
        self._store = store
        self._is_stopping = is_stopping
        self._name = uuid.uuid4().hex

    def delete_due(self) -> int:
        """Delete what was marked and is due, a bounded number at once. Returns how many objects went."""
        with self._db.reading() as session:
            due = garbage_queries.due(session, _AT_ONCE)
        deleted = self.delete_orphans(due)
        if due and deleted is not None:
            self._db.run(lambda session: garbage_queries.forget(session, due))
        return deleted or 0

    def audit(self) -> int:
        """Walk the bucket and delete what is old and not referred to. Returns how many objects and uploads went."""
        oldest_ms = now_ms() - self._grace_ms
        deleted = 0
        for prefix in _PREFIXES:
            old = (key for key, written_ms in self._store.list_keys(prefix) if written_ms <= oldest_ms)
            for some in _pieces(old):
                if self._is_stopping() or (gone := self.delete_orphans(some)) is None:
                    return deleted
                deleted += gone
            deleted += self._abort_uploads(prefix, oldest_ms)
        return deleted

    def delete_orphans(self, found: list[str]) -> int | None:
        """How many of these objects went. None: none may go, because somebody holds the collection."""
        if not found:
            return 0
        with self._sweep() as may_delete:
            if not may_delete:
                return None
            with self._db.reading() as session:
                needed = garbage_queries.referred_to(session, found)
            orphans = [key for key in found if key not in needed]
            if orphans:
                self._store.delete(orphans)
            return len(orphans)

    @contextmanager
    def _sweep(self) -> Iterator[bool]:
        """The right to delete, unless somebody holds the collection."""
        may_delete = self._db.run(lambda session: collection_queries.begin_sweep(session, self._name))
        try:
            yield may_delete
        finally:
            if may_delete:
                self._db.run(lambda session: collection_queries.end_sweep(session, self._name))

    def sweep(self, prefix: str) -> bool:
        """Delete whatever nobody refers to under a prefix, however young: nobody may write there any more.

        False: somebody holds the collection, so it isn't all gone.
        """
        for some in _pieces(key for key, _ in self._store.list_keys(prefix)):
            if self.delete_orphans(some) is None:
                return False
        self._abort_uploads(prefix)
        return True

    def _abort_uploads(self, prefix: str, oldest_ms: int | None = None) -> int:
        begun = self._store.list_uploads(prefix)
        old = [upload for upload in begun if oldest_ms is None or upload.started_ms <= oldest_ms]
        if not old:
            return 0
        with self._db.reading() as session:
            live = garbage_queries.finalizing(session, {upload.key for upload in old})
        aborted = [upload for upload in old if upload.key not in live]
        for upload in aborted:
            log.info("upload.aborted", key=upload.key)
            self._store.abort_multipart(upload.key, upload.upload_id)
        return len(aborted)


def _pieces(items: Iterable[str]) -> Iterator[list[str]]:
    left = iter(items)
    while some := list(islice(left, _AT_ONCE)):
        yield some
