"""The object of a unit's unfinished sequences: what was generated for lines that have no result yet (JSON, zstd).

It is a hint that saves work. What it holds of a line is the beginning of the answer that the line gets anyway, whoever
runs it and however often, so an old object is as right as a new one, and without any the line begins anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import orjson
import zstandard


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """One sequence. `line_no` is the first line of its row; `hit_tokens` what the cache held when it began."""

    line_no: int
    token_ids: tuple[int, ...]
    hit_tokens: int


def encode(sequences: Iterable[Unfinished]) -> bytes:
    """The object."""
    rows = [[one.line_no, one.hit_tokens, list(one.token_ids)] for one in sequences]
    return zstandard.ZstdCompressor(level=1).compress(orjson.dumps(rows))


def decode(data: bytes, sha256: str | None) -> dict[int, Unfinished]:
    """What `encode` was given, by line. Raises ValueError if it isn't what the unit's row names."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("The saved sequences aren't what their unit's row names.")
    rows = orjson.loads(zstandard.ZstdDecompressor().decompressobj().decompress(data))
    return {
        line_no: Unfinished(line_no=line_no, hit_tokens=hit_tokens, token_ids=tuple(token_ids))
        for line_no, hit_tokens, token_ids in rows
    }
