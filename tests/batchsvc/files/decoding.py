"""What tests of decoding share: bytes decoded as an upload or as a table, with what it took."""

from __future__ import annotations

import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchsvc.files.limited import Decoding, PieceFile, Source
from batchsvc.files.lines import Problem, UnreadableFileError
from batchsvc.files.unpack import DecodeLimits

LIMITS = DecodeLimits(max_line_bytes=1 << 20, max_decoded_bytes=8 * 10**9, max_expansion=250)
MOST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Decoded:
    """The form and the bytes of an upload."""

    form: str
    data: bytes


class _Peak(threading.Thread):
    """The most memory that a process has had at once. Not what `getrusage` says, which counts our own from before it
    became another program."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self.bytes = 0
        self.start()

    def run(self) -> None:
        with suppress(OSError, ProcessLookupError):
            while found := re.search(r"VmHWM:\s+(\d+) kB", self._status.read_text()):
                self.bytes = int(found[1]) * 1024
                time.sleep(0.002)


def decode(data: bytes, limits: DecodeLimits = LIMITS) -> Decoded:
    """An upload, decoded in a limited process."""
    with _decoding(data, limits, is_table=False) as decoding:
        pieces = b"".join(decoding.pieces())
        return Decoded(decoding.form, pieces)


def decode_table(data: bytes, limits: DecodeLimits = LIMITS) -> pa.Table:
    """Any table, decoded in a limited process."""
    with _decoding(data, limits, is_table=True) as decoding:
        with pa.ipc.open_stream(PieceFile(decoding.pieces())) as stream:
            table = stream.read_all()
        for _ in decoding.pieces():
            continue
        return table


@contextmanager
def _decoding(data: bytes, limits: DecodeLimits, *, is_table: bool) -> Iterator[Decoding]:
    decoding = Decoding(Source(len(data), lambda start, end: data[start:end]), limits, is_table=is_table)
    peak = _Peak(decoding.pid)
    try:
        with decoding:
            yield decoding
    finally:
        peak.join()
        assert 0 < peak.bytes < MOST_BYTES


def code_of(data: bytes, reader: Callable[[bytes], Any] = decode) -> str | None:
    """The code of the refusal, or None for a file that can be decoded."""
    try:
        reader(data)
    except UnreadableFileError as error:
        return error.problem.code
    return None


def refusal(data: bytes, reader: Callable[[bytes], Any] = decode) -> Problem:
    """Why a file is refused."""
    with pytest.raises(UnreadableFileError) as refused:
        reader(data)
    return refused.value.problem


def bomb(data: bytes, reader: Callable[[bytes], Any] = decode) -> Problem:
    """The same, having seen that refusing took less than 10 s of computing; memory is watched always."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    problem = refusal(data, reader)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    return problem
