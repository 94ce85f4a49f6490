"""Task `batch.finalize`: from the parts of a sealed batch to its output and error file, in input order, published once.

1. Take the right to finalize (`fin_epoch` + 1, a lease); this seals the batch the first time.
2. Clear away what earlier attempts have begun: every attempt starts over, under keys of its own epoch.
3. Window by window: fetch the parts, check each against its sha256, spool, add what never ran as error lines, and
   append all rows in line order to the two streams.
4. Check the counts, then publish by compare-and-set. Who was overtaken publishes nothing and discards its objects.

Killed anywhere, it leaves a lease that runs out, and the reaper sends the task again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import structlog

from batchsvc import failpoints
from batchsvc.batches import finalize_queries, part_file, reaper_queries, window_file
from batchsvc.batches.finalize_queries import Finalizing, PartToMerge, ResultFile, WindowToMerge
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.part_file import PartLine
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from workers.merge import WindowSpool
from workers.stream import ResultStream, StreamedObject

_KINDS = ("output", "error")
_NEVER_RAN = {
    Status.CANCELLED: ("batch_cancelled", "This request was not run before the batch was cancelled."),
    Status.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
}

log = structlog.get_logger(__name__)


class OvertakenError(Exception):
    """Another finalizer has the batch now."""


class DamagedError(Exception):
    """What is stored doesn't fit what was counted; nothing is published over it."""


class Finalizer:
    """Finalizes batches, one call a batch. `is_stopping`: the process wants to end, so the work is given back."""

    def __init__(
        self,
        settings: Settings,
        db: Database,
        store: ObjectStore,
        owner: str,
        *,
        spool_directory: Path | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._db = db
        self._store = store
        self._owner = owner
        self._spool_directory = spool_directory
        self._is_stopping = is_stopping

    def finalize(self, batch_id: str) -> bool:
        """Finalize a batch that is due. False: it isn't, or somebody else does it. Safe to run twice at once."""
        lease_s = self._settings.lease_s
        lease = self._db.run(lambda session: finalize_queries.begin(session, batch_id, self._owner, lease_s))
        if lease is None:
            return False
        failpoints.reach("batch.sealed")
        log.info("batch.finalizing", batch=batch_id, epoch=lease.epoch, why=lease.why)
        attempt = _Attempt(self._settings, self._db, self._store, lease, self._spool_directory, self._is_stopping)
        try:
            published = attempt.run()
        except OvertakenError:
            published = False
        if published:
            failpoints.reach("batch.published")
            log.info("batch.ended", batch=batch_id, status=lease.why)
        else:
            log.warning("batch.overtaken", batch=batch_id, epoch=lease.epoch)
            attempt.discard()
        return published


class _Attempt:
    """One attempt at one batch, under one `fin_epoch`."""

    def __init__(
        self,
        settings: Settings,
        db: Database,
        store: ObjectStore,
        lease: Finalizing,
        spool_directory: Path | None,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._db = db
        self._store = store
        self._lease = lease
        self._spool_directory = spool_directory
        self._is_stopping = is_stopping
        self._kept_s = monotonic_s()
        self._uploads: list[list[str]] = []
        self._streams = {
            kind: ResultStream(store, keys.output(lease.batch_id, lease.epoch, kind), on_upload=self._note_upload)
            for kind in _KINDS
        }

    def run(self) -> bool:
        """Merge and publish. False or OvertakenError: somebody else does it."""
        self._clear_earlier()
        with self._db.reading() as session:
            windows = finalize_queries.windows(session, self._lease.batch_id)
        for window in windows:
            self._merge(window)
            failpoints.reach("window.merged")
        completed, failed = (self._streams[kind].num_lines for kind in _KINDS)
        if completed + failed != self._lease.total:
            raise DamagedError(f"{completed + failed} lines were merged, but the batch has {self._lease.total}.")
        self._keep(at_once=True)
        results = []
        for kind, stream in self._streams.items():
            done = stream.finish()
            if done is not None:
                failpoints.reach("output.stored")
                results.append(_result(kind, done))
        failpoints.reach("batch.publishing")
        return self._db.run(
            lambda session: finalize_queries.publish(
                session,
                self._lease.batch_id,
                self._lease.epoch,
                results,
                completed=completed,
                failed=failed,
                file_ttl_s=self._settings.file_ttl_s,
            )
        )

    def discard(self) -> None:
        """Throw away what this attempt has stored."""
        for stream in self._streams.values():
            stream.abort()
        stored = [stream.key for stream in self._streams.values()]
        self._db.run(lambda session: reaper_queries.discard(session, stored))

    def _clear_earlier(self) -> None:
        for state in self._lease.stale:
            for key, upload_id in state["uploads"]:
                self._store.abort_multipart(key, upload_id)
        earlier = [
            keys.output(self._lease.batch_id, epoch, kind) for epoch in range(1, self._lease.epoch) for kind in _KINDS
        ]
        self._db.run(lambda session: reaper_queries.discard(session, earlier))

    def _merge(self, window: WindowToMerge) -> None:
        with self._db.reading() as session:
            parts = finalize_queries.parts(session, self._lease.batch_id, window.no)
        with WindowSpool(self._settings.spool_bytes, self._spool_directory) as spool:
            for part in parts:
                spool.add(self._fetch(part))
                self._keep()
            spool.add(self._never_ran(window, spool.line_nos()))
            for line in spool.merged():
                self._streams["output" if line.is_ok else "error"].append(line.row)
                self._keep()

    def _fetch(self, part: PartToMerge) -> list[PartLine]:
        data = self._store.get(part.s3_key)
        if hashlib.sha256(data).hexdigest() != part.sha256:
            raise DamagedError(f"The object {part.s3_key} isn't what was counted: its sha256 differs.")
        lines = part_file.decode(data)
        num_ok = sum(line.is_ok for line in lines)
        if (num_ok, len(lines) - num_ok) != (part.lines_ok, part.lines_err):
            raise DamagedError(f"The object {part.s3_key} holds other lines than were counted.")
        return lines

    def _never_ran(self, window: WindowToMerge, finished: set[int]) -> list[PartLine]:
        """Error lines for what a cancelled or expired batch has left undone."""
        if len(finished) == window.num_lines:
            return []
        if self._lease.why not in _NEVER_RAN:
            raise DamagedError(f"Window {window.no} has {len(finished)} results for {window.num_lines} lines.")
        code, message = _NEVER_RAN[self._lease.why]
        lines = window_file.read(self._store.get(window.line_nos_key))
        return [
            PartLine(
                line_no=line_no,
                is_ok=False,
                row=part_file.error_row(
                    batch_id=self._lease.batch_id, line_no=line_no, custom_id=custom_id, code=code, message=message
                ),
            )
            for line_no, custom_id in zip(lines.line_nos, lines.custom_ids, strict=True)
            if line_no not in finished
        ]

    def _note_upload(self, key: str, upload_id: str) -> None:
        self._uploads.append([key, upload_id])
        state = {"uploads": self._uploads}
        batch_id, epoch = self._lease.batch_id, self._lease.epoch
        self._db.run(lambda session: finalize_queries.save_segment(session, batch_id, epoch, 0, state))

    def _keep(self, *, at_once: bool = False) -> None:
        """Prolong the lease now and then. Raises OvertakenError when it isn't ours any more."""
        if not at_once and monotonic_s() - self._kept_s < self._settings.renew_s:
            return
        batch_id, epoch, lease_s = self._lease.batch_id, self._lease.epoch, self._settings.lease_s
        if self._is_stopping():
            self._db.run(lambda session: finalize_queries.give_up(session, batch_id, epoch))
            raise OvertakenError("This process ends.")
        if not self._db.run(lambda session: finalize_queries.keep(session, batch_id, epoch, lease_s)):
            raise OvertakenError("The lease is someone else's.")
        self._kept_s = monotonic_s()


def _result(kind: str, done: StreamedObject) -> ResultFile:
    return ResultFile(kind=kind, s3_key=done.s3_key, etag=done.etag, sha256=done.sha256, size_bytes=done.size_bytes)
