"""Merging a window: lines of its parts, in whatever order, become rows of the output and error stream in input order.

The parts of a window are copied into one spool file on local disk, while numbers, places and lengths of their rows
are kept in arrays. Then the window is cut, in line order, into buckets of at most `bucket_bytes`; each is read and
sorted in memory. So memory holds one bucket and 25 bytes a line, whatever the size of the window.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from batchsvc.batches.part_file import PartLine

_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MergedLine:
    """A row and the stream it belongs to."""

    line_no: int
    is_ok: bool
    row: bytes


class WindowSpool:
    """The lines of one window on local disk. Use as a context manager: the file is deleted at the end."""

    def __init__(self, bucket_bytes: int, directory: Path | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._file = tempfile.TemporaryFile(dir=directory, buffering=_COPY_BYTES)  # noqa: SIM115  closed in __exit__
        self._line_nos: list[int] = []
        self._oks: list[bool] = []
        self._lengths: list[int] = []

    def __enter__(self) -> WindowSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, lines: Iterable[PartLine]) -> None:
        """Keep finished lines; the order doesn't matter."""
        for line in lines:
            self._file.write(line.row)
            self._line_nos.append(line.line_no)
            self._oks.append(line.is_ok)
            self._lengths.append(len(line.row))

    def line_nos(self) -> set[int]:
        """Numbers of the lines that are here. Raises ValueError if one is here twice."""
        found = set(self._line_nos)
        if len(found) != len(self._line_nos):
            raise ValueError("A line has two results.")
        return found

    def merged(self) -> Iterator[MergedLine]:
        """All lines in line order."""
        line_nos = np.array(self._line_nos, np.int64)
        lengths = np.array(self._lengths, np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
        order = np.argsort(line_nos, kind="stable")
        self._file.flush()
        for start, stop in _buckets(lengths[order], self._bucket_bytes):
            bucket = order[start:stop]
            rows: dict[int, bytes] = {}
            for index in np.sort(bucket):  # in file order, so that the disk is read forwards
                self._file.seek(int(offsets[index]))
                rows[int(index)] = self._file.read(int(lengths[index]))
            for index in bucket:
                yield MergedLine(int(line_nos[index]), self._oks[index], rows[int(index)])


def _buckets(lengths: np.ndarray[Any, np.dtype[np.int64]], most_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts [0, len(lengths)) into runs that add up to at most `most_bytes`; a longer row is a run of its own."""
    ends = np.cumsum(lengths)
    start, before = 0, 0
    while start < len(lengths):
        stop = max(int(np.searchsorted(ends, before + most_bytes, side="right")), start + 1)
        yield start, stop
        start, before = stop, int(ends[stop - 1])
