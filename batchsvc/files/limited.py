"""Decodes a file of any format in a limited process of its own: see files/decoder.py for what passes between the two.

The process gets no keys and no settings, only the ranges of bytes that it asks for. When it runs into one of its
limits, or crashes, the file is refused with a sentence.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal

import orjson

from batchsvc.files.decoder import FRAME, LENGTH, RANGE
from batchsvc.files.lines import Problem, UnreadableFileError
from batchsvc.files.unpack import DecodeLimits, unreadable

Form = Literal["lines", "rows", "arrow"]
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
_QUIET = {  # one thread and one heap each, so that the limit of memory means what it says
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes come from: `fetch(start, end)` returns those of a file of `size_bytes`."""

    size_bytes: int
    fetch: Callable[[int, int], bytes]


class Decoding:
    """A running decoder. `form` says what its pieces are. End it by leaving the context; it dies with its parent."""

    def __init__(self, source: Source, limits: DecodeLimits, *, is_table: bool) -> None:
        self._source = source
        options = {"size_bytes": source.size_bytes, "is_table": is_table, "limits": asdict(limits)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "batchsvc.files.decoder", orjson.dumps(options).decode()],
            env={name: os.environ[name] for name in _KEPT if name in os.environ} | _QUIET,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.form: Form = "lines"
        self._pieces = self._received()

    def __enter__(self) -> Decoding:
        try:
            first = next(self._pieces, b"")  # the kind is known before the first piece
        except BaseException:
            self._end()
            raise
        self._pieces = _again(first, self._pieces)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def pieces(self) -> Iterator[bytes]:
        """What the file decodes to. Raises UnreadableFileError when there comes no more, for a reason of the file."""
        return self._pieces

    def _received(self) -> Iterator[bytes]:
        while True:
            letter, payload = self._frame()
            match letter:
                case b"R":
                    self._answer(*RANGE.unpack(payload))
                case b"K":
                    self.form = _FORMS[payload]
                case b"D":
                    yield payload
                case b"X":
                    raise UnreadableFileError(Problem(**orjson.loads(payload)))
                case _:
                    return

    def _frame(self) -> tuple[bytes, bytes]:
        assert self._process.stdout is not None, "it was made with pipes"
        head = self._process.stdout.read(FRAME.size)
        if len(head) == FRAME.size:
            letter, size = FRAME.unpack(head)
            payload = self._process.stdout.read(size)
            if len(payload) == size:
                return letter, payload
        raise _death(self._process.wait())

    def _answer(self, start: int, end: int) -> None:
        data = self._source.fetch(start, end)
        assert self._process.stdin is not None, "it was made with pipes"
        try:
            self._process.stdin.write(LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _death(self._process.wait()) from None

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


class PieceFile(io.RawIOBase):
    """Pieces as a readable file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        """As many bytes as asked for, fewer at the end only."""
        found, missing = [], sys.maxsize if size is None or size < 0 else size
        while missing > 0:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = memoryview(piece)
            found.append(bytes(self._rest[:missing]))
            self._rest = self._rest[len(found[-1]) :]
            missing -= len(found[-1])
        return b"".join(found)


_FORMS: dict[bytes, Form] = {b"lines": "lines", b"rows": "rows", b"arrow": "arrow"}


def _death(code: int) -> UnreadableFileError:
    if code == -signal.SIGXCPU:
        return unreadable("The file takes too long to decode: it is damaged, or made to.")
    return unreadable("The file can't be decoded within the limits of memory: it is damaged, or made to.")


def _again(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest
