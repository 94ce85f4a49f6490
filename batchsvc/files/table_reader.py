"""Reads any table on this machine as batches of Arrow columns with line numbers, decoded in a limited process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from batchsvc.files.limited import Decoding, PieceFile, Source
from batchsvc.files.unpack import DecodeLimits, unreadable

LIMITS = DecodeLimits(max_line_bytes=16 * 1024 * 1024, max_decoded_bytes=1 << 40, max_expansion=250)


@dataclass(frozen=True, slots=True)
class TableBatch:
    """Some rows: their line numbers, and their columns."""

    lines: list[int]
    columns: pa.RecordBatch


class TableReader:
    """An opened table. `schema` is that of its columns. Raises UnreadableFileError and OSError."""

    def __init__(self, path: Path, limits: DecodeLimits = LIMITS) -> None:
        self._file = path.open("rb")
        self._decoding = Decoding(Source(path.stat().st_size, self._fetch), limits, is_table=True)

    def __enter__(self) -> TableReader:
        try:
            self._decoding.__enter__()
            self._stream = pa.ipc.open_stream(PieceFile(self._decoding.pieces()))
        except pa.ArrowException as error:
            self._close()
            raise unreadable("The table can't be read: its decoder broke off.") from error
        except BaseException:
            self._close()
            raise
        fields = list(self._stream.schema)[1:]
        self.schema: pa.Schema = pa.schema(fields)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def batches(self) -> Iterator[TableBatch]:
        """The rows, once."""
        for batch in self._stream:
            lines = batch.column(0).to_pylist()
            yield TableBatch(lines, pa.record_batch(batch.columns[1:], schema=self.schema) if self.schema else batch)
        for _ in self._decoding.pieces():  # an error that came after the last batch is raised here
            continue

    def _fetch(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)

    def _close(self) -> None:
        self._decoding.__exit__(None, None, None)
        self._file.close()


def values_of(column: pa.Array) -> list[Any]:
    """The values of a column as Python has them; times as text, because they may be finer than Python's."""
    if not pa.types.is_temporal(column.type):
        return list(column.to_pylist())
    try:
        return list(column.cast(pa.string()).to_pylist())
    except pa.ArrowNotImplementedError:  # a duration
        return list(column.cast(pa.int64()).to_pylist())
