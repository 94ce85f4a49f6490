"""The limited process that decodes a file for its parent: `python -P -m batchsvc.files.decoder OPTIONS` (JSON).

It is given no keys, no addresses and no file of its own but a temporary one for a packed Parquet file: it asks its
parent for ranges of bytes, and gives back what they decode to. Frames on standard output are a letter, a length and a
payload:

    R  start and end of a range (two integers); the parent answers with a length and the bytes
    K  what the data is: plain lines (`lines`), lines of files/rows.py (`rows`), or an Arrow stream (`arrow`)
    D  a piece of the data
    X  why the file can't be used (JSON of a problem); nothing follows
    Z  the end

Its memory is limited, and so is the time it may compute without having read or given out anything new; then the kernel
ends it. Nothing is held for long, so that a file of any size needs the same memory.
"""

from __future__ import annotations

import io
import os
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from batchsvc.files.csv_rows import read_csv
from batchsvc.files.formats import HEAD_BYTES, Kind, kind_of, packing_of, why_foreign
from batchsvc.files.lines import Problem, UnreadableFileError
from batchsvc.files.range_file import RangeFile
from batchsvc.files.rows import problem_line, row_line
from batchsvc.files.unpack import CHUNK_BYTES, DecodeLimits, Meter, chunks_of, sane_lines, unpacked, unreadable

FRAME = struct.Struct("<cQ")
RANGE = struct.Struct("<QQ")
LENGTH = struct.Struct("<Q")
CPU_S = 5
"""Seconds of computing without anything new, after which a decoder is ended."""
MEMORY_BYTES = 144 * 1024 * 1024
"""What a decoder may use beyond its program."""
_BUFFER_BYTES = 256 * 1024  # what a packed file is read by: what it unpacks to must be read within CPU_S
_REREADS = 4  # of all bytes, that count as something new: packed JSONL is read three times


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to decode, and into what. `is_table`: any table, into Arrow; else a file in batch form, into lines."""

    size_bytes: int
    is_table: bool
    limits: DecodeLimits


class Parent:
    """The pipe to the parent."""

    def __init__(self, asks: BinaryIO, answers: BinaryIO, size_bytes: int) -> None:
        self._asks, self._answers = asks, answers
        self._fetches_left = _REREADS * size_bytes + (64 << 20)

    def fetch(self, start: int, end: int) -> bytes:
        self.send(b"R", RANGE.pack(start, end))
        size = LENGTH.unpack(self._read(LENGTH.size))[0]
        data = self._read(size)
        self._fetches_left -= size
        if self._fetches_left > 0:
            renew_cpu()
        return data

    def data(self, piece: bytes) -> None:
        """Give out a piece of the data."""
        for at in range(0, len(piece), CHUNK_BYTES):
            self.send(b"D", piece[at : at + CHUNK_BYTES])
        renew_cpu()

    def send(self, letter: bytes, payload: bytes = b"") -> None:
        self._asks.write(FRAME.pack(letter, len(payload)) + payload)
        self._asks.flush()

    def _read(self, size: int) -> bytes:
        data = self._answers.read(size)
        if len(data) < size:
            raise SystemExit(0)  # the parent is gone
        return data


def main(arguments: list[str]) -> None:
    told = orjson.loads(arguments[0])
    options = Options(size_bytes=told["size_bytes"], is_table=told["is_table"], limits=DecodeLimits(**told["limits"]))
    parent = Parent(sys.stdout.buffer, sys.stdin.buffer, options.size_bytes)
    limit_memory(MEMORY_BYTES)
    renew_cpu()
    try:
        try:
            _decode(parent, options)
        except MemoryError:
            raise unreadable("The file needs too much memory to be decoded: it is damaged, or made to.") from None
        except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise unreadable(f"The file can't be decoded: {type(error).__name__}, {str(error)[:200]}") from error
    except UnreadableFileError as error:
        parent.send(b"X", orjson.dumps(error.problem.as_json()))
    else:
        parent.send(b"Z")


def limit_memory(beyond_bytes: int | None) -> None:
    """Let this process have so much memory more than it has; None: any."""
    most = resource.RLIM_INFINITY
    with suppress(OSError, ValueError):  # a system that can't count its memory so goes without
        if beyond_bytes is not None:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            most = pages * resource.getpagesize() + beyond_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def load_arrow() -> None:
    """Load the library for tables, which counts as part of the program."""
    limit_memory(None)
    import pyarrow.parquet  # noqa: F401

    limit_memory(MEMORY_BYTES)
    renew_cpu()


def renew_cpu() -> None:
    """Something new was seen: the time for computing begins again."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time()) + 1 + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _decode(parent: Parent, options: Options) -> None:
    file = io.BufferedReader(RangeFile(options.size_bytes, parent.fetch), _BUFFER_BYTES)
    head = file.peek(HEAD_BYTES)[:HEAD_BYTES]
    packing, limits = packing_of(head), options.limits

    def pieces() -> Iterator[bytes]:
        """The unpacked bytes, from the start."""
        file.seek(0)
        meter = Meter(limits, options.size_bytes)
        return chunks_of(file) if packing is None else unpacked(chunks_of(file, _BUFFER_BYTES), packing, meter)

    if packing is not None:
        head = _beginning(pieces())
    if packing is not None and packing_of(head) is not None:
        raise unreadable("The file is compressed twice: compress it once.")
    if (foreign := why_foreign(head)) is not None:
        raise unreadable(f"The file is {foreign}.")
    kind = kind_of(head, otherwise=Kind.CSV if options.is_table else Kind.JSONL)
    if options.is_table or kind is Kind.PARQUET:
        load_arrow()
    source: io.IOBase = file
    if kind is Kind.PARQUET and packing is not None:
        source = _spooled(pieces())

    def text() -> Iterator[bytes]:
        return sane_lines(pieces(), limits)

    if options.is_table:
        if packing is not None and kind is not Kind.PARQUET:
            for _ in text():  # counted first: a file that unpacks to too much isn't worth parsing
                continue
        _give_arrow(parent, kind, source, text, options)
    else:
        _give_lines(parent, kind, source, text(), options)


def _give_lines(parent: Parent, kind: Kind, source: io.IOBase, pieces: Iterator[bytes], options: Options) -> None:
    parent.send(b"K", b"lines" if kind is Kind.JSONL else b"rows")
    if kind is Kind.PARQUET:
        from batchsvc.files.parquet import batch_lines

        meter = Meter(options.limits, options.size_bytes)
        pieces = batch_lines(source, max_line_bytes=options.limits.max_line_bytes, meter=meter)
    elif kind is Kind.CSV:
        pieces = _csv_lines(pieces, options.limits.max_line_bytes)
    num_rows, most = 0, options.limits.max_rows
    for piece in pieces:
        num_rows += piece.count(b"\n")
        if kind is not Kind.JSONL and most is not None and num_rows > most:
            says = f"The file has more than {most} requests."
            raise UnreadableFileError(Problem(line=None, code="too_many_tasks", message=says, param="input_file_id"))
        parent.data(piece)


def _csv_lines(pieces: Iterator[bytes], max_line_bytes: int) -> Iterator[bytes]:
    """The rows of a table in batch form as lines. What is beyond the limit of a line is told of the row."""
    file = read_csv(pieces, max_line_bytes=2 * max_line_bytes)  # quotes are doubled
    places = [file.columns.index(name) for name in ("custom_id", "body")]
    for row, values in enumerate(file.rows, start=1):
        if isinstance(values, Problem):
            yield problem_line(values)
        else:
            custom_id, body = (values[place] for place in places)
            yield row_line(custom_id, body, row, max_line_bytes)


def _give_arrow(
    parent: Parent, kind: Kind, source: io.IOBase, pieces: Callable[[], Iterator[bytes]], options: Options
) -> None:
    import pyarrow as pa

    from batchsvc.files.arrow_table import csv_table, jsonl_table, parquet_table

    longest = options.limits.max_line_bytes
    match kind:
        case Kind.PARQUET:
            table = parquet_table(source, Meter(options.limits, options.size_bytes))
        case Kind.CSV:
            table = csv_table(pieces(), longest)
        case Kind.JSONL:
            table = jsonl_table(pieces, longest)
    parent.send(b"K", b"arrow")
    stream = pa.ipc.new_stream(_Sink(parent), table.schema)
    for batch in table.batches:
        stream.write_batch(batch)
    stream.close()  # not after an error: a stream that has an end would look complete


class _Sink(io.RawIOBase):
    """What an Arrow stream is written to."""

    def __init__(self, parent: Parent) -> None:
        super().__init__()
        self._parent = parent

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._parent.data(piece)
        return len(piece)


def _beginning(pieces: Iterator[bytes]) -> bytes:
    head = b""
    for piece in pieces:
        head += piece
        if len(head) >= HEAD_BYTES:
            break
    return head


def _spooled(pieces: Iterator[bytes]) -> io.IOBase:
    """A Parquet file has to be read from its end: unpacked into a temporary file, which goes with the process."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  closed by the end of the process
    for piece in pieces:
        file.write(piece)
        renew_cpu()
    file.seek(0)
    return file


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BrokenPipeError:
        os._exit(0)  # the parent has seen enough
