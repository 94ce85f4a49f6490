"""The window file: line numbers and custom_ids of a window, so that lines that never ran can be named in the end."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
import zstandard


def write(lines: Iterable[tuple[int, str | None]]) -> bytes:
    """(line number, custom_id) of every request of the window, rejected ones too, as compressed JSON."""
    return zstandard.ZstdCompressor(level=3).compress(orjson.dumps(list(lines)))


def read(data: bytes) -> list[tuple[int, str | None]]:
    """What `write` was given."""
    pairs = orjson.loads(zstandard.ZstdDecompressor().decompressobj().decompress(data))
    return [(line_no, custom_id) for line_no, custom_id in pairs]
