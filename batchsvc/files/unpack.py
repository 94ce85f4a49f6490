"""Unpacks gzip and zstd in pieces of bounded size, and stops at what grows too much.

A few kilobytes can unpack to gigabytes. So input goes to the decompressor in pieces small enough that no call returns
more than some megabytes, and what has come out is counted: beyond a free share it may be so many times the size of the
file and no more. Several members or frames after one another are one file; one that ends early is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import zstandard

from batchsvc.files.formats import Packing
from batchsvc.files.lines import Problem, UnreadableFileError

FREE_BYTES = 64 * 1024 * 1024
"""What any file may unpack to, however small it is."""
CHUNK_BYTES = 1 << 20
ENDLESS_BYTES = 64 * 1024 * 1024
"""A line that is longer ends its file; a shorter one that is too long costs itself."""
_LINES_PER_ROW = 4
_GZIP_PIECE_BYTES = 1 << 20
_ZSTD_FEED_BYTES = 1024  # a block of 4 bytes gives 128 KiB
_ZSTD_WINDOW_BYTES = 1 << 27  # what zstd itself unpacks without being asked for more


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """What decoding a file may cost. `max_expansion`: times the size of the file, beyond FREE_BYTES; `max_rows`: of a
    table in batch form."""

    max_line_bytes: int
    max_decoded_bytes: int
    max_expansion: int
    max_rows: int | None = None

    def most_bytes(self, size_bytes: int) -> int:
        """What a file of this size may decode to."""
        return min(self.max_decoded_bytes, max(FREE_BYTES, self.max_expansion * size_bytes))


class Meter:
    """Counts decoded bytes against what a file of `size_bytes` may decode to."""

    def __init__(self, limits: DecodeLimits, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._most_bytes = limits.most_bytes(size_bytes)
        self._bytes = 0

    def count(self, num_bytes: int) -> None:
        """Raises UnreadableFileError when it is too much."""
        self._bytes += num_bytes
        if self._bytes > self._most_bytes:
            raise unreadable(
                f"The file of {self._size_bytes} bytes decodes to more than {self._most_bytes}, the most that a file "
                "of its size may: split it, or upload it as plain JSONL."
            )


def chunks_of(source: BinaryIO, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """A file from where it stands, in pieces."""
    while chunk := source.read(chunk_bytes):
        yield chunk


def unpacked(chunks: Iterable[bytes], packing: Packing, meter: Meter) -> Iterator[bytes]:
    """The unpacked bytes, none of the pieces empty. Raises UnreadableFileError."""
    pieces = _gunzip(chunks) if packing is Packing.GZIP else _unzstd(chunks)
    try:
        for piece in pieces:
            if piece:
                meter.count(len(piece))
                yield piece
    except (zlib.error, zstandard.ZstdError) as error:
        raise unreadable(f"The {packing} data can't be unpacked: {str(error)[:200]}.") from error


def sane_lines(pieces: Iterable[bytes], limits: DecodeLimits) -> Iterator[bytes]:
    """The same pieces of a text, as long as it may be a file of requests: a few times more lines than requests are
    allowed, as blank ones don't count, and none of them endless."""
    num_lines, open_bytes = 1, 0
    for piece in pieces:
        last = piece.rfind(b"\n")
        num_lines += piece.count(b"\n")
        open_bytes = open_bytes + len(piece) if last < 0 else len(piece) - last - 1
        if open_bytes > ENDLESS_BYTES:
            raise unreadable(f"Line {num_lines} has more than {ENDLESS_BYTES} bytes.", line=num_lines)
        if limits.max_rows is not None and num_lines > _LINES_PER_ROW * limits.max_rows + 1:
            says = f"The file has more than {_LINES_PER_ROW * limits.max_rows} lines."
            raise UnreadableFileError(Problem(line=None, code="too_many_tasks", message=says, param="input_file_id"))
        yield piece


def unreadable(message: str, *, line: int | None = None) -> UnreadableFileError:
    """The file can't be used, for this reason."""
    return UnreadableFileError(Problem(line=line, code="invalid_file", message=message))


def _gunzip(chunks: Iterable[bytes]) -> Iterator[bytes]:
    engine, is_inside = zlib.decompressobj(wbits=31), False
    for chunk in chunks:
        rest = chunk if is_inside else chunk.lstrip(b"\0")  # tapes and block devices pad with zeros
        is_inside = is_inside or bool(rest)
        while rest:
            piece = engine.decompress(rest, _GZIP_PIECE_BYTES)
            yield piece
            rest = engine.unconsumed_tail
            if engine.eof:
                rest = engine.unused_data.lstrip(b"\0")
                engine, is_inside = zlib.decompressobj(wbits=31), bool(rest)
            elif not rest and len(piece) == _GZIP_PIECE_BYTES:
                yield from _held_back(engine)
    if is_inside:
        raise unreadable("The gzip data ends early: the file is incomplete.")


def _held_back(engine: zlib._Decompress) -> Iterator[bytes]:
    """What a decompressor has taken in and not given out."""
    while len(piece := engine.decompress(b"", _GZIP_PIECE_BYTES)) == _GZIP_PIECE_BYTES:
        yield piece
    yield piece


def _unzstd(chunks: Iterable[bytes]) -> Iterator[bytes]:
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    engine, is_inside = context.decompressobj(), False
    for chunk in chunks:
        for at in range(0, len(chunk), _ZSTD_FEED_BYTES):
            rest = chunk[at : at + _ZSTD_FEED_BYTES]
            while rest:
                yield engine.decompress(rest)
                is_inside = not engine.eof
                rest = engine.unused_data if engine.eof else b""
                if engine.eof:
                    engine, is_inside = context.decompressobj(), bool(rest)
    if is_inside:
        raise unreadable("The zstd data ends early: the file is incomplete.")
