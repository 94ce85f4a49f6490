"""Result lines in input order, as far as they are there: of a running batch up to the first line that isn't finished.

The lines of a window lie in many parts; they are spooled to local disk and put in order a bucket at a time
(window_spool.py), so that memory doesn't grow with the window. After the end the two result files are walked beside
each other.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import orjson
from sqlalchemy.orm import Session

from batchsvc.batches import part_file, result_queries, window_file
from batchsvc.batches.damage import DamagedObjectError, verified
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.line_set import LineNos
from batchsvc.batches.part_file import PartRows
from batchsvc.batches.result_cursor import Cursor, Kind
from batchsvc.batches.result_queries import HeldLines
from batchsvc.batches.result_service import ResultFiles, Row, batch_at, chunks, cursor_of, file_rows
from batchsvc.batches.schemas import shown_status
from batchsvc.batches.tables import Window
from batchsvc.batches.window_spool import WindowSpool
from batchsvc.files.tables import File
from batchsvc.store.s3 import ObjectStore

_LINE = re.compile(rb'"line":(\d+)\}$')
_BUCKET_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """What a batch has at one moment for a reader in input order."""

    batch_id: str
    status: Status
    files: ResultFiles | None  # None: it hasn't ended
    windows: list[Window]
    parts: list[HeldLines]


def look(session: Session, project_id: str, batch_id: str, after: str | None) -> tuple[Ordered, Cursor]:
    """What there is for a reader who wants lines in input order. All of it has to be of one moment."""
    batch, results = batch_at(session, project_id, batch_id)
    cursor = cursor_of(batch, after, (Kind.INPUT,)) or Cursor(Kind.INPUT, (0, 0, 0))
    windows: list[Window] = []
    if results is None and batch.in_progress_ms is not None:
        windows = result_queries.windows_from(session, batch.id, cursor.values[0])
    parts = result_queries.counting_parts(session, batch.id, {window.no for window in windows}) if windows else []
    found = Ordered(batch_id=batch.id, status=shown_status(batch), files=results, windows=windows, parts=parts)
    return found, cursor


def lines(store: ObjectStore, found: Ordered, cursor: Cursor, limit: int | None) -> Iterator[bytes]:
    """The lines after the cursor, each with a cursor of its own, in chunks."""
    rows = _of_windows(store, found, cursor) if found.files is None else _of_files(store, found.files, cursor)
    return chunks(found.batch_id, islice(rows, limit))


def _of_files(store: ObjectStore, files: ResultFiles, cursor: Cursor) -> Iterator[Row]:
    last, *offsets = cursor.values

    def numbered(kind: int, file: File | None) -> Iterator[tuple[int, int, int, bytes]]:
        for end, row in file_rows(store, file, cursor.values[1 + kind]):
            yield line_of(row), kind, end, row

    streams = (numbered(0, files.output), numbered(1, files.error))
    for line_no, kind, end, row in heapq.merge(*streams, key=lambda item: item[0]):
        offsets[kind] = end
        if line_no > last:
            yield Row(Cursor(Kind.INPUT, (line_no, *offsets)), row)


def _of_windows(store: ObjectStore, found: Ordered, cursor: Cursor) -> Iterator[Row]:
    last = cursor.values[0]
    try:
        for window in found.windows:
            numbers = np.array(
                window_file.read(verified(store.get, window.line_nos_key, window.line_nos_sha256)).line_nos, np.int64
            )
            held = [(part, _line_nos(store, part)) for part in found.parts if part.part.window_no == window.no]
            finished = np.concatenate([np.empty(0, np.int64), *(line_nos for _, line_nos in held)])
            lacking = numbers[~np.isin(numbers, finished)]
            until = int(lacking[0]) if len(lacking) else int(numbers[-1]) + 1
            with WindowSpool(_BUCKET_BYTES) as spool:
                for part, line_nos in held:
                    if ((line_nos > last) & (line_nos < until)).any():
                        spool.add(_between(_read(store, part), last, until))
                for bucket in spool.merged():
                    for row in bucket.output.data.split(b"\n")[:-1]:
                        yield Row(Cursor(Kind.INPUT, (line_of(row), 0, 0)), row)
            if len(lacking):
                return
            last = until - 1
    except DamagedObjectError:  # it is found, too, by who merges the batch, and repaired
        return


def _line_nos(store: ObjectStore, held: HeldLines) -> LineNos:
    return _read(store, held).line_nos if held.line_nos is None else held.line_nos


def _read(store: ObjectStore, held: HeldLines) -> PartRows:
    return part_file.rows(verified(store.get, held.part.s3_key, held.part.sha256))


def _between(rows: PartRows, last: int, until: int) -> PartRows:
    """The rows after `last` and before `until`, all as one stream."""
    kept = (rows.line_nos > last) & (rows.line_nos < until)
    all_one = np.ones(int(kept.sum()), np.bool_)
    return PartRows(rows.text, rows.line_nos[kept], all_one, rows.starts[kept], rows.ends[kept])


def line_of(row: bytes) -> int:
    """The number of a result line."""
    found = _LINE.search(row, max(0, len(row) - 40))
    return int(found[1]) if found else int(orjson.loads(row)["line"])
