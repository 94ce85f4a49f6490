"""Parquet as a stream of records: one a row, from the columns `custom_id` and `body` (JSON text).

A Parquet file can claim anything: 283 bytes can decode to gigabytes. So rows are decoded a few at a time, the decoded
bytes are counted against a budget, and only text columns are read. Row numbers (1-based) are the line numbers.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchsvc.files.lines import Problem, Record, UnreadableFileError, parse_object

MAGIC = b"PAR1"
COLUMNS = ("custom_id", "body")
_BATCH_ROWS = 16
_MAX_FOOTER_BYTES = 16 * 1024 * 1024
_MAX_FOOTER_ITEMS = 1_000_000


class RangeFile(io.RawIOBase):
    """A seekable, read-only file over `fetch(start, end)`, which returns bytes [start, end) of an object."""

    def __init__(self, size_bytes: int, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self._size_bytes = size_bytes
        self._fetch = fetch
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        data = self._fetch(self._position, self._position + wanted) if wanted else b""
        self._position += len(data)
        return data


def parquet_records(
    source: RangeFile, *, endpoint: str, max_line_bytes: int, max_decoded_bytes: int, first_row: int = 0
) -> Iterator[Record]:
    """Records from row `first_row` (0-based) on. Raises UnreadableFileError for a file that can't be used at all."""
    try:
        file = _opened(source)
        _check_columns(file.schema_arrow)
        yield from _rows(file, endpoint, max_line_bytes, max_decoded_bytes, first_row)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(f"The Parquet file can't be read: {str(error).splitlines()[0][:200]}") from error


def num_rows(source: RangeFile) -> int:
    """How many rows a file says it has; none if it can't be used at all."""
    try:
        return int(_opened(source).metadata.num_rows)
    except (pa.ArrowException, OSError, ValueError):
        return 0


def _opened(source: RangeFile) -> pq.ParquetFile:
    return pq.ParquetFile(
        source,
        memory_map=False,
        pre_buffer=False,
        buffer_size=1 << 20,
        thrift_string_size_limit=_MAX_FOOTER_BYTES,
        thrift_container_size_limit=_MAX_FOOTER_ITEMS,
    )


def _rows(
    file: pq.ParquetFile, endpoint: str, max_line_bytes: int, max_decoded_bytes: int, first_row: int
) -> Iterator[Record]:
    row = 0
    groups: list[int] = []
    for index in range(file.metadata.num_row_groups):
        num_rows = file.metadata.row_group(index).num_rows
        if groups or row + num_rows > first_row:
            groups.append(index)
        else:
            row += num_rows
    decoded_bytes = 0
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=list(COLUMNS), use_threads=False):
        decoded_bytes += batch.nbytes
        if decoded_bytes > max_decoded_bytes:
            raise _unreadable(f"The Parquet file decodes to more than {max_decoded_bytes} bytes.")
        ids, bodies = (batch.column(name).cast(pa.large_binary()) for name in COLUMNS)
        for custom_id, body in zip(ids, bodies, strict=True):
            row += 1
            if row > first_row:
                yield _record(row, _buffer(custom_id), _buffer(body), endpoint, max_line_bytes)


def _record(
    row: int, custom_id: memoryview | None, body: memoryview | None, endpoint: str, max_line_bytes: int
) -> Record:
    size = sum(len(part) for part in (custom_id, body) if part is not None)
    if size > max_line_bytes:
        problem = Problem(
            line=row,
            code="line_too_long",
            message=f"The row has {size} bytes; at most {max_line_bytes} are allowed.",
        )
        return Record(line_no=row, next_offset=row, value={}, problem=problem)
    value: dict[str, Any] = {"method": "POST", "url": endpoint}
    if custom_id is not None:
        try:
            value["custom_id"] = str(custom_id, "utf-8")
        except UnicodeDecodeError:
            problem = Problem(line=row, code="invalid_value", param="custom_id", message="custom_id is not UTF-8.")
            return Record(line_no=row, next_offset=row, value={}, problem=problem)
    if body is not None:
        parsed = parse_object(bytes(body), line_no=row, code="invalid_json_line", what="body", param="body")
        if isinstance(parsed, Problem):
            return Record(line_no=row, next_offset=row, value={}, problem=parsed)
        value["body"] = parsed
    return Record(line_no=row, next_offset=row, value=value)


def _buffer(scalar: Any) -> memoryview | None:
    return memoryview(scalar.as_buffer()) if scalar.is_valid else None


def _check_columns(schema: pa.Schema) -> None:
    for name in COLUMNS:
        found = schema.get_all_field_indices(name)
        if not found:
            raise _unreadable(f"The Parquet file has no column {name}: it needs custom_id and body, both text.")
        if len(found) > 1:
            raise _unreadable(f"The Parquet file has the column {name} {len(found)} times.")
        kind = schema.field(found[0]).type
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(plain) or pa.types.is_large_string(plain)):
            raise _unreadable(f"The column {name} of the Parquet file must be text, not {kind}.")


def _unreadable(message: str) -> UnreadableFileError:
    return UnreadableFileError(Problem(line=None, code="invalid_file", message=message))
