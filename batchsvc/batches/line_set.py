"""A set of line numbers in few bytes, for a column: about one byte a line. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

LineNos = np.ndarray[Any, np.dtype[np.int64]]


def encode(line_nos: Iterable[int]) -> bytes:
    """The set; the order of the numbers doesn't matter."""
    ascending = np.unique(np.fromiter(line_nos, np.int64))
    return zlib.compress(np.diff(ascending, prepend=0).astype("<u8").tobytes())


def decode(data: bytes) -> LineNos:
    """The numbers, ascending."""
    return np.cumsum(np.frombuffer(zlib.decompress(data), "<u8").astype(np.int64))
