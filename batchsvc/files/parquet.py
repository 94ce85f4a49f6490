"""Parquet as a stream of Arrow batches, a few rows at a time. Runs in a limited process: see files/decoder.py.

A Parquet file can claim anything: 283 bytes can decode to gigabytes. So the footer is limited, batches are small, and
the decoded bytes are counted. Memory that a page claims beyond the limits of the process is an error here, too.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from batchsvc.files.formats import BATCH_COLUMNS, MAX_COLUMNS, twice_named
from batchsvc.files.lines import Problem
from batchsvc.files.rows import problem_line, row_line, too_long
from batchsvc.files.unpack import Meter, unreadable

_BATCH_ROWS = 32  # a page of a few bytes can hold long values many times
_MAX_FOOTER_BYTES = 16 * 1024 * 1024
_MAX_FOOTER_ITEMS = 1_000_000


class ParquetTable:
    """An opened file. Every method raises UnreadableFileError for a file that can't be used."""

    def __init__(self, source: io.IOBase) -> None:
        with _errors():
            self._file = pq.ParquetFile(
                source,
                memory_map=False,
                pre_buffer=False,
                buffer_size=1 << 20,
                thrift_string_size_limit=_MAX_FOOTER_BYTES,
                thrift_container_size_limit=_MAX_FOOTER_ITEMS,
            )
            if self._file.metadata.num_columns > MAX_COLUMNS:
                raise unreadable(f"The Parquet file has more than {MAX_COLUMNS} columns.")
            self.schema: pa.Schema = self._file.schema_arrow
        if (twice := twice_named(self.schema.names)) is not None:
            raise unreadable(f"The Parquet file has the column {twice[:100]!r} twice.")

    def batches(self, columns: Sequence[str], meter: Meter) -> Iterator[pa.RecordBatch]:
        """The rows, of these columns; those of a dictionary by their values."""
        with _errors():
            for batch in self._file.iter_batches(batch_size=_BATCH_ROWS, columns=list(columns), use_threads=False):
                values = [
                    column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
                    for column in batch.columns
                ]
                meter.count(sum(column.nbytes for column in values))
                yield pa.record_batch(values, batch.schema.names)


def batch_lines(source: io.IOBase, *, max_line_bytes: int, meter: Meter) -> Iterator[bytes]:
    """The rows of a table in batch form as lines: see files/rows.py."""
    table = ParquetTable(source)
    _check_columns(table.schema)
    row = 0
    for batch in table.batches(BATCH_COLUMNS, meter):
        with _errors():
            ids, bodies = (batch.column(name).cast(pa.large_binary()) for name in BATCH_COLUMNS)
        lines = []
        for custom_id, body in zip(ids, bodies, strict=True):
            row += 1
            lines.append(_line(custom_id, body, row, max_line_bytes))
        yield b"".join(lines)


def _line(custom_id: pa.Scalar, body: pa.Scalar, row: int, max_line_bytes: int) -> bytes:
    parts = [value.as_buffer() if value.is_valid else None for value in (custom_id, body)]
    if (size := sum(len(part) for part in parts if part is not None)) > max_line_bytes:
        return problem_line(too_long(row, size, max_line_bytes))
    texts: list[str | None] = []
    for name, part in zip(BATCH_COLUMNS, parts, strict=True):
        try:
            texts.append(None if part is None else str(part, "utf-8"))
        except UnicodeDecodeError:
            return problem_line(Problem(line=row, code="invalid_value", param=name, message=f"{name} is not UTF-8."))
    return row_line(texts[0], texts[1], row, max_line_bytes)


def _check_columns(schema: pa.Schema) -> None:
    for name in BATCH_COLUMNS:
        if name not in schema.names:
            raise unreadable(f"The Parquet file has no column {name}: it needs custom_id and body, both text.")
        kind = schema.field(name).type
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(plain) or pa.types.is_large_string(plain) or pa.types.is_string_view(plain)):
            raise unreadable(f"The column {name} of the Parquet file must be text, not {kind}.")


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise  # told by the process, with its limit
    except (pa.ArrowException, OSError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise unreadable(f"The Parquet file can't be read: {lines[0][:200]}") from error
