"""The spans of a batch, each told by the process that did the work; nothing happens where no traces are wanted.

file.upload         the root of the trace
  batch             from its creation to its end
    batch.create    the call that made it
    batch.plan      a window of its input
    unit.run        a unit under one lease
      part.write    finished lines, stored and counted
    batch.finalize  one attempt to put its results together
      batch.publish the moment at which they can be read
"""

from __future__ import annotations

import structlog
from sqlalchemy.exc import SQLAlchemyError

from batchsvc import tracing
from batchsvc.batches import lifecycle
from batchsvc.batches.tables import Batch
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.db.session import Database

_NS_PER_MS = 1_000_000
_MOST_KNOWN = 4_096  # batches whose input file a process remembers

log = structlog.get_logger(__name__)


def created(batch_id: str, file_id: str, *, began_ns: int) -> None:
    """A call has made a batch."""
    said = {"batchsvc.batch.id": batch_id}
    above = tracing.about_batch(batch_id)
    tracing.record("batch.create", said, file_id=file_id, began_ns=began_ns, parent=above)


class BatchTraces:
    """Spans of work on batches whose ids alone are at hand: their input files are looked up. Never raises for a
    database that is away; a span is then missing."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._files: dict[str, str] = {}

    def planned(self, batch_id: str, progress: str, *, began_ns: int) -> None:
        """A planner has done a window. If that was the end of the batch, its span is made. One that had nothing to do,
        or was overtaken, says nothing."""
        if not tracing.is_on() or progress == "lost":
            return
        said: dict[str, tracing.Attribute] = {"batchsvc.batch.id": batch_id, "batchsvc.progress": progress}
        self._record("batch.plan", batch_id, began_ns, None, tracing.about_batch(batch_id), said)
        self.ended(batch_id)

    def ran(self, unit: ClaimedUnit, outcome: str, *, began_ns: int) -> None:
        """A worker has let go of a unit: it is done, given back or lost."""
        if not tracing.is_on():
            return
        said: dict[str, tracing.Attribute] = {
            "batchsvc.batch.id": unit.batch_id,
            "batchsvc.unit.id": unit.id,
            "batchsvc.unit.epoch": unit.epoch,
            "batchsvc.unit.lines": unit.num_lines,
            "batchsvc.outcome": outcome,
        }
        own, parent = tracing.about_unit(unit.id, unit.epoch), tracing.about_batch(unit.batch_id)
        self._record("unit.run", unit.batch_id, began_ns, own, parent, said, is_error=outcome == "lost")

    def counted(self, unit: ClaimedUnit, part: NewPart, *, began_ns: int) -> None:
        """A part of a unit was stored and counts."""
        if not tracing.is_on():
            return
        said: dict[str, tracing.Attribute] = {
            "batchsvc.part.id": part.id,
            "batchsvc.part.bytes": part.size_bytes,
            "batchsvc.part.lines_ok": part.lines_ok,
            "batchsvc.part.lines_error": part.lines_err,
            "batchsvc.part.input_tokens": part.input_tokens,
            "batchsvc.part.output_tokens": part.output_tokens,
        }
        self._record("part.write", unit.batch_id, began_ns, None, tracing.about_unit(unit.id, unit.epoch), said)

    def finalized(self, batch_id: str, epoch: int, *, began_ns: int, publishing_ns: int | None) -> None:
        """An attempt has ended; `publishing_ns` is when it began to publish, if it has published."""
        if not tracing.is_on():
            return
        said: dict[str, tracing.Attribute] = {"batchsvc.batch.id": batch_id, "batchsvc.fin_epoch": epoch}
        own, outcome = f"finalize {batch_id} {epoch}", "given back" if publishing_ns is None else "published"
        above = tracing.about_batch(batch_id)
        self._record("batch.finalize", batch_id, began_ns, own, above, said | {"batchsvc.outcome": outcome})
        if publishing_ns is not None:
            self._record("batch.publish", batch_id, publishing_ns, None, own, said)
            self.ended(batch_id)

    def ended(self, batch_id: str) -> None:
        """Make the span of a batch, if it has ended."""
        if not tracing.is_on():
            return
        try:
            with self._db.reading() as session:
                row = session.get(Batch, batch_id)
        except SQLAlchemyError as error:
            log.info("trace.lacks_a_span", batch=batch_id, error=type(error).__name__)
            return
        if row is None or row.ended_ms is None or row.status not in lifecycle.TERMINAL:
            return
        said: dict[str, tracing.Attribute] = {
            "batchsvc.batch.id": row.id,
            "batchsvc.batch.status": row.status,
            "batchsvc.batch.tier": row.tier,
            "batchsvc.batch.lines": row.total,
            "batchsvc.batch.lines_error": row.failed,
        }
        tracing.record(
            "batch",
            said,
            file_id=row.input_file_id,
            began_ns=row.created_ms * _NS_PER_MS,
            ended_ns=row.ended_ms * _NS_PER_MS,
            own=tracing.about_batch(row.id),
            parent=tracing.about_upload(row.input_file_id),
            is_error=row.status == lifecycle.Status.FAILED,
        )

    def _record(
        self,
        name: str,
        batch_id: str,
        began_ns: int,
        own: str | None,
        parent: str,
        said: dict[str, tracing.Attribute],
        *,
        is_error: bool = False,
    ) -> None:
        file_id = self._file_of(batch_id)
        if file_id is not None:
            tracing.record(name, said, file_id=file_id, began_ns=began_ns, own=own, parent=parent, is_error=is_error)

    def _file_of(self, batch_id: str) -> str | None:
        if batch_id not in self._files:
            try:
                with self._db.reading() as session:
                    row = session.get(Batch, batch_id)
            except SQLAlchemyError as error:
                log.info("trace.lacks_a_span", batch=batch_id, error=type(error).__name__)
                return None
            if row is None:
                return None
            while len(self._files) >= _MOST_KNOWN:
                self._files.pop(next(iter(self._files)), None)
            self._files[batch_id] = row.input_file_id
        return self._files.get(batch_id)
