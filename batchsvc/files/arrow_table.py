"""Any table as a stream of Arrow batches, each row with its line number first. Runs in a limited process.

Types stay what they are: those of a Parquet file its own, those of CSV text, those of JSONL what all values of a column
have in common (text, whole numbers, numbers, true or false), or else JSON text, marked so in the field's metadata. So
"007" stays "007". JSONL is read twice: first for its columns. Line numbers are physical lines of JSONL, and rows of
CSV and Parquet, 1-based.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from batchsvc.files.csv_rows import read_csv
from batchsvc.files.formats import MAX_COLUMNS
from batchsvc.files.lines import Problem, UnreadableFileError, jsonl_records
from batchsvc.files.parquet import ParquetTable
from batchsvc.files.unpack import Meter, unreadable

LINE = "line"
"""The first column of every batch; a column of the table may have the same name."""
IS_JSON = {b"json": b"1"}
"""Metadata of a text column that holds JSON."""
_BATCH_ROWS, _BATCH_BYTES = 1024, 2 * 1024 * 1024
_INT64 = range(-(2**63), 2**63)
Rows = Iterator[tuple[int, Sequence[Any], int]]  # line, values by column, about how many bytes


@dataclass(frozen=True, slots=True)
class ArrowTable:
    """A schema with the line number first, and the batches."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def parquet_table(source: io.IOBase, meter: Meter) -> ArrowTable:
    """A Parquet file. Columns of a dictionary are given by their values."""
    table = ParquetTable(source)
    fields = [_plain(column) for column in table.schema]
    schema = pa.schema([pa.field(LINE, pa.int64()), *fields])

    def batches() -> Iterator[pa.RecordBatch]:
        row = 1
        for batch in table.batches(table.schema.names, meter):
            numbers = pa.array(range(row, row + len(batch)), pa.int64())
            yield pa.record_batch([numbers, *batch.columns], schema=schema)
            row += len(batch)

    return ArrowTable(schema, batches())


def csv_table(pieces: Iterator[bytes], max_line_bytes: int) -> ArrowTable:
    """A CSV file. Its first broken row ends it."""
    file = read_csv(pieces, max_line_bytes=max_line_bytes)
    fields = [pa.field(name, pa.string()) for name in file.columns]

    def rows() -> Rows:
        for row, values in enumerate(file.rows, start=1):
            if isinstance(values, Problem):
                raise unreadable(f"Row {row} of the CSV file can't be used. {values.message}", line=row)
            yield row, values, sum(map(len, values))

    return _table(fields, rows())


def jsonl_table(read: Callable[[], Iterator[bytes]], max_line_bytes: int) -> ArrowTable:
    """A JSONL file, which `read` begins anew each time. Its first broken line ends it."""
    columns: dict[str, _Column] = {}
    for _, value, _ in _objects(read(), max_line_bytes):
        for name, item in value.items():
            columns.setdefault(name, _Column()).see(item)
        if len(columns) > MAX_COLUMNS:
            raise unreadable(f"The lines have more than {MAX_COLUMNS} different keys: as a table, that is too many.")
    found = list(columns.items())

    def rows() -> Rows:
        for line, value, size in _objects(read(), max_line_bytes):
            yield line, [column.cell(value.get(name)) for name, column in found], size

    return _table([column.field(name) for name, column in found], rows())


def _objects(pieces: Iterator[bytes], max_line_bytes: int) -> Iterator[tuple[int, dict[str, Any], int]]:
    before = 0
    for record in jsonl_records(pieces, max_line_bytes=max_line_bytes):
        if record.problem is not None:
            says = f"Line {record.line_no} can't be used. {record.problem.message}"
            raise UnreadableFileError(Problem(line=record.line_no, code=record.problem.code, message=says))
        if record.flaw is not None:
            raise unreadable(f"Line {record.line_no} can't be used. {record.flaw.message}", line=record.line_no)
        yield record.line_no, record.value, record.next_offset - before
        before = record.next_offset


@dataclass(slots=True)
class _Column:
    """The values of a key, as far as they were seen."""

    kinds: set[type] = field(default_factory=set)

    def see(self, value: Any) -> None:
        if value is not None:
            is_big = type(value) is int and value not in _INT64
            self.kinds.add(dict if is_big else type(value))

    @property
    def type(self) -> pa.DataType:
        match self.kinds:
            case kinds if kinds <= {str}:
                return pa.string()
            case kinds if kinds == {bool}:
                return pa.bool_()
            case kinds if kinds == {int}:
                return pa.int64()
            case kinds if kinds <= {int, float}:
                return pa.float64()
            case _:
                return None

    def field(self, name: str) -> pa.Field:
        return pa.field(name, pa.string(), metadata=IS_JSON) if self.type is None else pa.field(name, self.type)

    def cell(self, value: Any) -> Any:
        return orjson.dumps(value).decode() if self.type is None and value is not None else value


def _table(fields: list[pa.Field], rows: Rows) -> ArrowTable:
    schema = pa.schema([pa.field(LINE, pa.int64()), *fields])

    def batches() -> Iterator[pa.RecordBatch]:
        lines: list[int] = []
        cells: list[Sequence[Any]] = []
        size = 0
        for line, values, num_bytes in rows:
            lines.append(line)
            cells.append(values)
            size += num_bytes
            if len(lines) == _BATCH_ROWS or size >= _BATCH_BYTES:
                yield _batch(schema, lines, cells)
                lines, cells, size = [], [], 0
        if lines:
            yield _batch(schema, lines, cells)

    return ArrowTable(schema, batches())


def _batch(schema: pa.Schema, lines: list[int], cells: list[Sequence[Any]]) -> pa.RecordBatch:
    columns = zip(*cells, strict=True) if len(schema) > 1 else ()
    return pa.record_batch(
        [pa.array(values, kind) for values, kind in zip([lines, *columns], schema.types, strict=True)], schema=schema
    )


def _plain(column: pa.Field) -> pa.Field:
    return column.with_type(column.type.value_type) if pa.types.is_dictionary(column.type) else column
