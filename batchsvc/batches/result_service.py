"""Result lines as they come, in order of commit: which lines, in which order, from which objects.

A part counts from its commit on; its number (`seq`) is given under the lock of the batch, so whoever sees a part sees
all before it. The order of lines is that of parts, and of line numbers in a part. **A line has the place of the first
part that ever counted it.** When a part is taken back because its object is damaged, its lines run again and stand in a
later part; they keep their place all the same: a reader who has passed it has them and skips them later, one who
hasn't gets them there, as soon as they are there. After all parts come the lines that never ran, which the end of the
batch has written into its error file. So a place never moves, and a reader who goes on after the cursor of the last
line that he has gets each line once, whatever dies, changes hands or is repaired meanwhile.

An answer may end early (a damaged part that waits for its repair). Nothing is left only when the batch has ended and an
answer has no line. Reading changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import orjson
from sqlalchemy.orm import Session

from batchsvc.batches import never_ran, part_file, result_cursor, result_queries, service
from batchsvc.batches.damage import DamagedObjectError, verified
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.part_file import PartRows
from batchsvc.batches.result_cursor import Cursor, Kind
from batchsvc.batches.result_queries import HeldLines, StoredPart
from batchsvc.batches.schemas import shown_status
from batchsvc.batches.tables import Batch
from batchsvc.errors import InvalidRequestError, NotFoundError, UnavailableError
from batchsvc.files import service as files
from batchsvc.files.tables import File
from batchsvc.store.s3 import ObjectStore

_CHUNK_LINES = 256


class Row(NamedTuple):
    """A result line, and the cursor of a reader who has it."""

    cursor: Cursor
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """The published files of an ended batch; None: it has none of the kind."""

    output: File | None
    error: File | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a batch has at one moment, as far as a reader at a cursor needs to know."""

    batch_id: str
    status: Status
    files: ResultFiles | None  # None: it hasn't ended
    parts: list[StoredPart]
    void: list[HeldLines]
    again: list[HeldLines]  # the parts that count in the windows of the void ones
    has_tail: bool


class _NotYetError(Exception):
    """The next line isn't there; it will be."""


def batch_at(session: Session, project_id: str, batch_id: str) -> tuple[Batch, ResultFiles | None]:
    """A batch and, if it has ended, its files. Raises NotFoundError, also for results that were deleted."""
    batch = service.get(session, project_id, batch_id)
    if batch.status not in TERMINAL:
        return batch, None
    return batch, ResultFiles(
        output=_file(session, batch, batch.output_file_id), error=_file(session, batch, batch.error_file_id)
    )


def cursor_of(batch: Batch, after: str | None, kinds: tuple[Kind, ...]) -> Cursor | None:
    """The cursor that a reader gives. Raises InvalidRequestError unless it is one of this batch and this order."""
    if after is None:
        return None
    cursor = result_cursor.decode(batch.id, after)
    if cursor is None or cursor.kind not in kinds:
        raise _no_cursor(batch.id)
    if cursor.kind is Kind.PART and cursor.values[0] > batch.part_seq:
        raise InvalidRequestError(
            "after: the lines up to this cursor were lost when the database was restored: begin without it.",
            code="invalid_value",
            param="after",
        )
    return cursor


def look(session: Session, project_id: str, batch_id: str, after: str | None) -> tuple[Progress, Cursor | None]:
    """What there is for a reader who wants lines in order of commit. All of it has to be of one moment."""
    batch, results = batch_at(session, project_id, batch_id)
    cursor = cursor_of(batch, after, (Kind.PART, Kind.TAIL))
    progress = Progress(
        batch_id=batch.id, status=shown_status(batch), files=results, parts=[], void=[], again=[], has_tail=False
    )
    if batch.in_progress_ms is None:  # what the planner has rejected so far doesn't count before planning has ended
        return progress, cursor
    void = result_queries.void_parts(session, batch.id)
    again = result_queries.counting_parts(session, batch.id, {held.part.window_no for held in void}) if void else []
    at_tail = cursor is not None and cursor.kind is Kind.TAIL
    has_tail = results is not None and result_queries.num_counting_lines(session, batch.id) < batch.total
    from_seq = cursor.values[0] if cursor else 1
    parts = [] if at_tail else result_queries.parts(session, batch.id, from_seq)
    return (
        Progress(
            batch_id=batch.id,
            status=progress.status,
            files=results,
            parts=parts,
            void=void,
            again=again,
            has_tail=has_tail,
        ),
        cursor,
    )


def lines(store: ObjectStore, progress: Progress, cursor: Cursor | None, limit: int | None) -> Iterator[bytes]:
    """The lines after the cursor, each with a cursor of its own, in chunks. The first is fetched here, while an error
    can still be answered."""
    return chunks(progress.batch_id, islice(_Reader(store, progress).rows(cursor), limit))


def chunks(batch_id: str, rows: Iterator[Row]) -> Iterator[bytes]:
    """Rows as JSONL, some at a time; the first ones are fetched at once."""
    pieces = _joined(batch_id, rows)
    return chain([next(pieces, b"")], pieces)


def _joined(batch_id: str, rows: Iterator[Row]) -> Iterator[bytes]:
    while some := list(islice(rows, _CHUNK_LINES)):
        yield b"".join(_line(batch_id, row) for row in some)


def _line(batch_id: str, row: Row) -> bytes:
    return row.data[:-1] + b',"cursor":"' + result_cursor.encode(batch_id, row.cursor).encode() + b'"}\n'


class _Reader:
    """Reads what one look at a batch has found."""

    def __init__(self, store: ObjectStore, progress: Progress) -> None:
        self._store = store
        self._progress = progress
        self._owner: dict[int, int] = {}  # of lines that a void part has held first: its number
        for held in progress.void:
            for line_no in [] if held.line_nos is None else held.line_nos.tolist():
                self._owner.setdefault(line_no, held.part.seq)
        self._again = {
            line_no: held.part
            for held in progress.again
            if self._owner and held.line_nos is not None
            for line_no in held.line_nos.tolist()
            if self._owner.get(line_no, held.part.seq) < held.part.seq
        }

    def rows(self, cursor: Cursor | None) -> Iterator[Row]:
        """The rows after the cursor, as far as they are there."""
        has_ended = self._progress.files is not None
        try:
            for part in self._progress.parts:
                after = cursor.values[1] if cursor and cursor.values[0] == part.seq else 0
                found = self._of_void(part, after) if part.is_void else self._of_part(part, after)
                for line_no, data in found:
                    yield Row(Cursor(Kind.PART, (part.seq, line_no)), data)
        except _NotYetError:
            return
        except DamagedObjectError as error:
            if not has_ended:  # who merges the parts finds it, too, and has its lines run again
                return
            raise UnavailableError(
                f"A part of {self._progress.batch_id} is missing from the store: read its result files.",
                code="content_missing",
            ) from error
        if self._progress.has_tail:
            yield from self._tail(cursor.values[0] if cursor and cursor.kind is Kind.TAIL else 0)

    def _of_part(self, part: StoredPart, after: int) -> Iterator[tuple[int, bytes]]:
        rows = self._read(part)
        for place in np.argsort(rows.line_nos).tolist():
            line_no = int(rows.line_nos[place])
            if line_no > after and self._owner.get(line_no, part.seq) >= part.seq:
                yield line_no, rows.text[rows.starts[place] : rows.ends[place]]

    def _of_void(self, part: StoredPart, after: int) -> Iterator[tuple[int, bytes]]:
        """The lines of a part that was taken back, from where they are now."""
        mine = sorted(line_no for line_no, seq in self._owner.items() if seq == part.seq and line_no > after)
        found: dict[int, bytes] = {}
        for other in dict.fromkeys(self._again[line_no] for line_no in mine if line_no in self._again):
            rows = self._read(other)
            for place, line_no in enumerate(rows.line_nos.tolist()):
                if self._again.get(line_no) == other:
                    found[line_no] = rows.text[rows.starts[place] : rows.ends[place]]
        if not found.keys() >= set(mine):
            found |= self._never_ran(set(mine) - found.keys())
        for line_no in mine:
            if line_no not in found:
                raise _NotYetError
            yield line_no, found[line_no]

    def _never_ran(self, wanted: set[int]) -> dict[int, bytes]:
        """Error lines of requests that a part has held, and that were never run again."""
        if self._progress.files is None:
            return {}
        rows = (row for _, row in self._errors(0))
        return {line_no: row for row in rows if (line_no := _never_ran(row)) in wanted and line_no is not None}

    def _tail(self, offset: int) -> Iterator[Row]:
        for end, row in self._errors(offset):
            try:
                line_no = _never_ran(row)
            except orjson.JSONDecodeError as error:  # it begins in the middle of a line: nobody was given this cursor
                raise _no_cursor(self._progress.batch_id) from error
            if line_no is not None and line_no not in self._owner:
                yield Row(Cursor(Kind.TAIL, (end,)), row)

    def _errors(self, offset: int) -> Iterator[tuple[int, bytes]]:
        results = self._progress.files
        return file_rows(self._store, results.error if results else None, offset)

    def _read(self, part: StoredPart) -> PartRows:
        return part_file.rows(verified(self._store.get, part.s3_key, part.sha256))


def file_rows(store: ObjectStore, file: File | None, offset: int) -> Iterator[tuple[int, bytes]]:
    """The rows of a result file from a byte on, each with the byte where the next one begins."""
    if file is None or offset >= file.size_bytes:
        return
    rest = b""
    try:
        for piece in store.stream(file.s3_key, start=offset, end=file.size_bytes, etag=file.etag or None):
            *whole, rest = (rest + piece).split(b"\n")
            for row in whole:
                offset += len(row) + 1
                yield offset, row
    except NotFoundError as error:
        raise UnavailableError(f"The bytes of {file.id} are missing from the store.", code="content_missing") from error


def _no_cursor(batch_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"after: it is not a cursor of {batch_id} in this order: give the `cursor` of the last line that you have, "
        "or none to begin.",
        code="invalid_value",
        param="after",
    )


def _never_ran(row: bytes) -> int | None:
    """The number of the line, if it is one that the end of the batch has left undone."""
    found = orjson.loads(row)
    is_one = found["response"] is None and found["error"]["code"] in never_ran.CODES
    return int(found["line"]) if is_one else None


def _file(session: Session, batch: Batch, file_id: str | None) -> File | None:
    if file_id is None:
        return None
    try:
        return files.get(session, batch.project_id, file_id)
    except NotFoundError as error:
        raise NotFoundError(
            f"The results of {batch.id} are gone: {file_id} was deleted, or its life is over.",
            code="results_deleted",
            param="batch_id",
        ) from error
