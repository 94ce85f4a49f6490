"""JSON that is kept or sent by the thousand: without the spare room that its encoder leaves behind, on one line."""

from __future__ import annotations

from typing import Any

import orjson

# line ends for clients that split on more than \n; inside JSON they can only stand in strings
_ESCAPES = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def compact_json(value: Any, option: int = 0) -> bytes:
    """As orjson.dumps, which doesn't give back what is left of its buffer of 4 KiB."""
    return bytes(memoryview(orjson.dumps(value, option=option)))


def one_line_json(value: Any, option: int = 0) -> bytes:
    """As `compact_json`, and one line for whoever splits it into lines."""
    line = compact_json(value, option)
    if not line.isascii():
        for raw, escaped in _ESCAPES:
            line = line.replace(raw, escaped)
    return line
