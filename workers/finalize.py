"""Task `batch.finalize`: from the parts of a sealed batch to its output and error file, in input order, published once.

1. Take the right to finalize (`fin_epoch` + 1, a lease that a thread renews); this seals the batch the first time.
2. Clear away what earlier attempts have begun: every attempt starts over, under keys of its own epoch.
3. Window by window: fetch the parts, check each against its sha256, spool, add what never ran as error lines, and
   append all rows in line order to the two streams.
4. Check the counts, then publish by compare-and-set. Who was overtaken publishes nothing and discards its objects.

A part that is missing or damaged is taken back at once (finalize_queries tells how); the attempt then only looks
through the other parts, so that all damage is found in one pass, and gives the batch back until its lines are there
again. While the store doesn't answer, an attempt waits for it. Killed anywhere, it leaves a lease that runs out, and
the reaper sends the task again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import structlog
from sqlalchemy.orm import Session

from batchsvc import counters, failpoints
from batchsvc.batches import finalize_queries, garbage_queries, never_ran, part_file, window_file
from batchsvc.batches.damage import DamagedObjectError, verified
from batchsvc.batches.finalize_queries import Finalizing, ResultFile, WindowToMerge
from batchsvc.batches.kept_lease import KeptLease, LeaseLostError
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.part_file import PartRows
from batchsvc.batches.traces import BatchTraces
from batchsvc.batches.window_spool import Numbers, WindowSpool
from batchsvc.clock import now_ns
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from workers.finished import DamagedPart, PartReader
from workers.patience import Patience
from workers.stream import ResultStream, StreamedObject, UploadLostError

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE_S = 60.0  # that a store may be silent
_UNRUN = {
    Status.CANCELLED: "cancelled",
    Status.EXPIRED: "expired",
    Status.COMPLETED: "lost",
}  # as counters.UNRUN has it

log = structlog.get_logger(__name__)


class DamagedError(Exception):
    """What is stored doesn't fit what was counted; nothing is published over it."""


class _StoppedError(Exception):
    """The process ends, or lines have to be run again first: the batch is given back."""


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
        self._traces = BatchTraces(db)

    def finalize(self, batch_id: str) -> bool:
        """Finalize a batch that is due. False: it isn't, or somebody else does it. Safe to run twice at once."""
        lease_s, began_ns = self._settings.lease_s, now_ns()
        lease = self._db.run(lambda session: finalize_queries.begin(session, batch_id, self._owner, lease_s))
        if lease is None:
            return False
        failpoints.reach("batch.sealed")
        log.info("batch.finalizing", batch=batch_id, epoch=lease.epoch, why=lease.why)
        attempt = _Attempt(self._settings, self._db, self._store, lease, self._spool_directory, self._is_stopping)
        why_not = "overtaken"
        try:
            published = attempt.run()
        except (LeaseLostError, _StoppedError, UploadLostError) as error:
            published, why_not = False, type(error).__name__
        finally:
            attempt.close()
        if published:
            counters.LINES_UNRUN.labels(_UNRUN[lease.why]).inc(attempt.num_unrun)
            failpoints.reach("batch.published")
            log.info("batch.ended", batch=batch_id, status=lease.why)
        else:
            log.info("batch.not_finalized", batch=batch_id, epoch=lease.epoch, error=why_not)
            attempt.discard()
        publishing_ns = attempt.publishing_ns if published else None
        self._traces.finalized(batch_id, lease.epoch, began_ns=began_ns, publishing_ns=publishing_ns)
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
        self._kept = KeptLease(self._renew, settings.renew_s)
        persist = Patience(_PATIENCE_S, self._check)
        self._fetch: Callable[[str], bytes] = lambda key: persist(lambda: store.get(key))
        self._is_sound = True  # nothing damaged was found
        self._num_merged = 0
        self.publishing_ns: int | None = None  # when it began to publish
        self.num_unrun = 0  # lines that got an error line because nobody ran them
        self._uploads: list[list[str]] = []
        self._streams = {
            kind: ResultStream(
                store,
                keys.output(lease.batch_id, lease.epoch, kind),
                on_upload=self._note_upload,
                persist=persist,
            )
            for kind in keys.OUTPUT_KINDS
        }

    def run(self) -> bool:
        """Merge and publish. False or one of several errors: the batch waits, or somebody else does it."""
        with self._kept:
            self._clear_earlier()
            with self._db.reading() as session:
                windows = finalize_queries.windows(session, self._lease.batch_id)
                parts = [finalize_queries.parts(session, self._lease.batch_id, window.no) for window in windows]
            with PartReader(self._fetch) as reader:
                found = reader.read(chain.from_iterable(parts))  # the next window's while one is merged
                for window, its_parts in zip(windows, parts, strict=True):
                    self._merge(window, islice(found, len(its_parts)))
                    failpoints.reach("window.merged")
            if not self._is_sound:
                raise _StoppedError
            completed, failed = (self._streams[kind].num_lines for kind in keys.OUTPUT_KINDS)
            if completed + failed != self._lease.total:
                raise DamagedError(f"{completed + failed} lines were merged, but the batch has {self._lease.total}.")
            self._check()
            results = [_result(kind, done) for kind, stream in self._streams.items() if (done := stream.finish())]
            failpoints.reach("batch.publishing")
            file_ttl_s, self.publishing_ns = self._settings.file_ttl_s, now_ns()
            return self._fenced(
                finalize_queries.publish, results, completed=completed, failed=failed, file_ttl_s=file_ttl_s
            )

    def close(self) -> None:
        """End the threads, whatever came of the attempt."""
        for stream in self._streams.values():
            stream.close()

    def discard(self) -> None:
        """Throw away what this attempt has stored, and let somebody else have the batch."""
        for stream in self._streams.values():
            stream.abort()
        stored = [stream.key for stream in self._streams.values()]
        self._db.run(lambda session: garbage_queries.discard(session, stored))
        self._fenced(finalize_queries.give_up)

    def _clear_earlier(self) -> None:
        for state in self._lease.stale:
            for key, upload_id in state["uploads"]:
                self._store.abort_multipart(key, upload_id)
        earlier = [
            keys.output(self._lease.batch_id, epoch, kind)
            for epoch in range(1, self._lease.epoch)
            for kind in keys.OUTPUT_KINDS
        ]
        self._db.run(lambda session: garbage_queries.discard(session, earlier))

    def _merge(self, window: WindowToMerge, parts: Iterator[PartRows | DamagedPart]) -> None:
        with WindowSpool(self._settings.spool_bytes, self._spool_directory) as spool:
            for found in parts:
                self._check()
                if isinstance(found, DamagedPart):
                    self._void(found)
                elif self._is_sound:
                    spool.add(found)
            if self._is_sound and (missing := self._never_ran(window, spool.line_nos())) is not None:
                spool.add(missing)
            if not self._is_sound:
                return
            for bucket in spool.merged():
                self._streams["output"].append(bucket.output)
                self._streams["error"].append(bucket.error)
                self._num_merged += bucket.output.num_lines + bucket.error.num_lines
                self._check()

    def _void(self, damaged: DamagedPart) -> None:
        part = damaged.part
        log.error(
            "part.damaged", batch=self._lease.batch_id, part=part.id, key=part.s3_key, reason=damaged.reason,
            lines=part.lines_ok + part.lines_err,
        )  # fmt: skip
        self._is_sound = False
        if not self._fenced(finalize_queries.void_part, part.id):
            raise LeaseLostError
        failpoints.reach("part.voided")

    def _never_ran(self, window: WindowToMerge, finished: Numbers) -> PartRows | None:
        """Error lines for what a cancelled or expired batch has left undone, and for work that was lost."""
        num_missing = window.num_lines - len(finished)
        if num_missing == 0:
            return None
        if self._lease.why == Status.COMPLETED and num_missing != window.num_lost:
            raise DamagedError(f"Window {window.no} has {len(finished)} results for {window.num_lines} lines.")
        try:
            data = verified(self._fetch, window.line_nos_key, window.line_nos_sha256)
        except DamagedObjectError as error:
            log.warning("window.damaged", batch=self._lease.batch_id, key=error.key, reason=error.reason)
            self._is_sound = False
            self._fenced(finalize_queries.return_window, window.no)
            return None
        code, message = never_ran.BY_END[self._lease.why]
        lines, done = window_file.read(data), set(finished.tolist())
        missing = [pair for pair in zip(lines.line_nos, lines.custom_ids, strict=True) if pair[0] not in done]
        error_row = partial(part_file.error_row, batch_id=self._lease.batch_id, code=code, message=message)
        rows = [error_row(line_no=line_no, custom_id=custom_id) for line_no, custom_id in missing]
        self.num_unrun += len(rows)
        return part_file.error_rows([line_no for line_no, _ in missing], rows)

    def _note_upload(self, key: str, upload_id: str) -> None:
        self._uploads.append([key, upload_id])
        self._fenced(finalize_queries.save_segment, 0, {"uploads": self._uploads})

    def _renew(self) -> bool:
        return self._fenced(finalize_queries.keep, self._settings.lease_s, self._num_merged)

    def _check(self) -> None:
        """Raise when this attempt must not go on."""
        if self._is_stopping():
            raise _StoppedError
        self._kept.check()

    def _fenced(self, work: Callable[Concatenate[Session, str, int, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query that names this attempt, in a transaction of its own."""
        batch_id, epoch = self._lease.batch_id, self._lease.epoch
        return self._db.run(lambda session: work(session, batch_id, epoch, *args, **kwargs))


def _result(kind: str, done: StreamedObject) -> ResultFile:
    failpoints.reach("output.stored")
    return ResultFile(kind=kind, s3_key=done.s3_key, etag=done.etag, sha256=done.sha256, size_bytes=done.size_bytes)
