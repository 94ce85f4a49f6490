"""Merging a window: the rows of its parts, in whatever order, become output and error rows in input order.

A window's parts are kept as texts, in memory as long as they fit one bucket, else in one temporary file on local
disk, while numbers and places of their rows are kept in arrays. Then the window is cut, in line order, into buckets
of at most `bucket_bytes`; each is read and put in order in memory. So memory holds one bucket, twice, and 40 bytes a
line, whatever the size of the window. Rows are never parsed here, only cut out and joined.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from batchsvc.batches.part_file import PartRows

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Row = bytes | memoryview


class Rows(NamedTuple):
    """Rows of one stream, each with its newline."""

    data: bytes
    num_lines: int


class MergedBucket(NamedTuple):
    """The next rows in line order, by stream."""

    output: Rows
    error: Rows


class WindowSpool:
    """The rows of one window. Use as a context manager: what is on disk is deleted at the end."""

    def __init__(self, bucket_bytes: int, directory: Path | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self._directory = directory
        self._texts: list[bytes] = []  # what isn't in the file
        self._size_bytes = 0
        self._file: BinaryIO | None = None
        self._places: list[PartRows] = []  # without their texts, in coordinates of all texts together

    def __enter__(self) -> WindowSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, rows: PartRows) -> None:
        """Keep rows; the order doesn't matter."""
        base = self._size_bytes
        self._texts.append(rows.text)
        self._size_bytes += len(rows.text)
        self._places.append(rows._replace(text=b"", starts=rows.starts + base, ends=rows.ends + base))
        if self._size_bytes > self._bucket_bytes:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115  see __exit__
            for text in self._texts:
                _write(self._file, text)
            self._texts.clear()

    def line_nos(self) -> Numbers:
        """Numbers of the lines that are here, ascending. Raises ValueError if one is here twice."""
        found = np.sort(self._joined("line_nos", np.int64))
        if (found[1:] == found[:-1]).any():
            raise ValueError("A line has two results.")
        return found

    def merged(self) -> Iterator[MergedBucket]:
        """All rows in line order."""
        order = np.argsort(self._joined("line_nos", np.int64), kind="stable")
        starts, ends = self._joined("starts", np.int64)[order], self._joined("ends", np.int64)[order]
        is_ok = self._joined("is_ok", np.bool_)[order]
        for start, stop in _buckets(ends - starts, self._bucket_bytes):
            bucket = slice(start, stop)
            rows = self._read(starts[bucket], ends[bucket])
            oks = is_ok[bucket].tolist()
            yield MergedBucket(
                _joined([row for row, ok in zip(rows, oks, strict=True) if ok]),
                _joined([row for row, ok in zip(rows, oks, strict=True) if not ok]),
            )

    def _read(self, starts: Numbers, ends: Numbers) -> list[Row]:
        if self._file is None:
            return self._cut(starts, ends)
        rows: list[Row] = [b""] * len(starts)
        file, order = self._file.fileno(), np.argsort(starts)  # so that the disk is read forwards
        for place, start, end in zip(order.tolist(), starts[order].tolist(), ends[order].tolist(), strict=True):
            rows[place] = os.pread(file, end - start, start)
        return rows

    def _cut(self, starts: Numbers, ends: Numbers) -> list[Row]:
        """Rows of the texts in memory, without copying them."""
        texts = [memoryview(text) for text in self._texts]
        bases = np.cumsum([0, *map(len, texts)])
        which = np.searchsorted(bases, starts, side="right") - 1
        base = bases[which]
        places = zip(which.tolist(), (starts - base).tolist(), (ends - base).tolist(), strict=True)
        return [texts[text][start:end] for text, start, end in places]

    def _joined(self, name: str, kind: type[Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([np.empty(0, kind), *(getattr(rows, name) for rows in self._places)])


def _joined(rows: list[Row]) -> Rows:
    return Rows(b"\n".join([*rows, b""]), len(rows))


def _write(file: BinaryIO, text: bytes) -> None:
    left = memoryview(text)
    while left:
        left = left[file.write(left) :]


def _buckets(lengths: Numbers, most_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts [0, len(lengths)) into runs that add up to at most `most_bytes`; a longer row is a run of its own."""
    ends = np.cumsum(lengths)
    start, before = 0, 0
    while start < len(lengths):
        stop = max(int(np.searchsorted(ends, before + most_bytes, side="right")), start + 1)
        yield start, stop
        start, before = stop, int(ends[stop - 1])
