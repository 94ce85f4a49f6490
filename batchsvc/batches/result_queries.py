"""SQL of results as they come: parts in order of commit, the lines of those that were taken back, what lacks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import SQLColumnExpression

from batchsvc.batches import line_set
from batchsvc.batches.line_set import LineNos
from batchsvc.batches.tables import Batch, Part, Window


class StoredPart(NamedTuple):
    """A part, where it stands in the order, and its object."""

    id: str
    seq: int
    window_no: int
    s3_key: str
    sha256: str
    is_void: bool


class HeldLines(NamedTuple):
    """The lines of a part; None: an older worker added it, and nobody noted them."""

    part: StoredPart
    line_nos: LineNos | None


_COLUMNS = (Part.id, func.coalesce(Part.seq, 0), Part.window_no, Part.s3_key, Part.sha256, Part.is_void)


def next_seq(batch: Batch) -> int:
    """The number of a new part of a batch that is locked: who sees it committed sees all before it."""
    batch.part_seq = (batch.part_seq or 0) + 1
    return batch.part_seq


def number_older(session: Session, batch: Batch) -> None:
    """Number the parts of a locked batch that an older worker has added without."""
    unnumbered = select(Part).where(Part.batch_id == batch.id, Part.seq.is_(None)).order_by(Part.created_ms, Part.id)
    for part in session.scalars(unnumbered):
        part.seq = next_seq(batch)


def parts(session: Session, batch_id: str, from_seq: int) -> list[StoredPart]:
    """The parts of a batch from this one on, in order, those included that were taken back. Served by ix_parts_seq."""
    found = select(*_COLUMNS).where(Part.batch_id == batch_id, Part.seq >= from_seq).order_by(Part.seq)
    return [_part(row) for row in session.execute(found)]


def void_parts(session: Session, batch_id: str) -> list[HeldLines]:
    """The parts that were taken back, in order. Served by ix_parts_void."""
    void = (Part.batch_id == batch_id, Part.is_void, Part.seq.is_not(None))
    return _held(session, void)


def counting_parts(session: Session, batch_id: str, window_nos: Collection[int]) -> list[HeldLines]:
    """The parts of these windows that count. Served by ix_parts_window."""
    counting = (Part.batch_id == batch_id, Part.window_no.in_(window_nos), Part.is_void.is_(False))
    return _held(session, counting)


def num_counting_lines(session: Session, batch_id: str) -> int:
    """How many lines the parts that count hold: the others of an ended batch never ran."""
    held = func.coalesce(func.sum(Part.lines_ok + Part.lines_err), 0)
    return int(session.scalar(select(held).where(Part.batch_id == batch_id, Part.is_void.is_(False))) or 0)


def windows_from(session: Session, batch_id: str, line_no: int) -> list[Window]:
    """The windows of a batch that have lines after this one, in input order."""
    later = (Window.batch_id == batch_id, Window.last_line > line_no)
    return list(session.scalars(select(Window).where(*later).order_by(Window.no)))


def _held(session: Session, which: tuple[SQLColumnExpression[bool], ...]) -> list[HeldLines]:
    rows = session.execute(select(*_COLUMNS, Part.line_nos).where(*which).order_by(Part.seq))
    return [HeldLines(_part(row), None if row.line_nos is None else line_set.decode(row.line_nos)) for row in rows]


def _part(row: Any) -> StoredPart:
    """From a row that begins with `_COLUMNS`."""
    return StoredPart(*row[: len(_COLUMNS)])


def newest_parts_with_errors(session: Session, batch_id: str, limit: int) -> list[tuple[str, str]]:
    """Key and sha256 of parts that hold error lines and count, the newest first."""
    found = select(Part.s3_key, Part.sha256).where(
        Part.batch_id == batch_id, Part.lines_err > 0, Part.is_void.is_(False)
    )
    newest = found.order_by(Part.created_ms.desc(), func.coalesce(Part.seq, 0).desc()).limit(limit)
    return [(key, sha256) for key, sha256 in session.execute(newest)]
