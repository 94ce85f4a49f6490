"""A seekable, read-only file over a function that fetches ranges of bytes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class RangeFile(io.RawIOBase):
    """`fetch(start, end)` returns the bytes [start, end) of an object of `size_bytes`."""

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

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(max(0, self._size_bytes - self._position), len(view))
        data = self._fetch(self._position, self._position + wanted) if wanted else b""
        view[: len(data)] = data
        self._position += len(data)
        return len(data)
