"""The window file: line number and custom_id of every request of a window, as Parquet.

Two readers need it: the finalizer, to name the lines that never ran, and a planner that resumes, to know which
custom_ids are taken. A custom_id that couldn't be read is null.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class WindowLines(NamedTuple):
    """Line numbers, ascending, and their custom_ids."""

    line_nos: Sequence[int]
    custom_ids: Sequence[str | None]


def write(lines: WindowLines) -> bytes:
    """The object of a window (zstd)."""
    table = pa.table(
        {"line_no": pa.array(lines.line_nos, pa.int64()), "custom_id": pa.array(lines.custom_ids, pa.string())}
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    return sink.getvalue()


def read(data: bytes) -> WindowLines:
    """What `write` was given."""
    table = pq.read_table(io.BytesIO(data))
    return WindowLines(table.column("line_no").to_pylist(), table.column("custom_id").to_pylist())
