"""The cursor of result lines: how far a reader is, as text that means nothing to anybody else. Pure.

It names a place that never moves: a part by its number in order of commit, and a line by its number in the input. So
workers that die, units that change hands and parts that are run again don't touch it. A digest binds it to its batch:
what was cut, changed, or made for another batch is no cursor.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from enum import IntEnum

_TAG_BYTES = 6
_MOST_CHARS = 80
_MOST = 1 << 62


class Kind(IntEnum):
    """What the numbers of a cursor count."""

    PART = 1  # number of the part, line
    TAIL = 2  # byte of the error file, after all parts: lines that never ran
    INPUT = 3  # line, byte of the output file, byte of the error file


_NUM_VALUES = {Kind.PART: 2, Kind.TAIL: 1, Kind.INPUT: 3}


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place of the last line that a reader has."""

    kind: Kind
    values: tuple[int, ...]


def encode(batch_id: str, cursor: Cursor) -> str:
    """The cursor as text."""
    body = bytearray([cursor.kind])
    for value in cursor.values:
        while value >= 0x80:
            body.append(value & 0x7F | 0x80)
            value >>= 7
        body.append(value)
    return base64.urlsafe_b64encode(_tag(batch_id, bytes(body)) + body).rstrip(b"=").decode()


def decode(batch_id: str, text: str) -> Cursor | None:
    """What `encode` was given, or None for anything that it hasn't made for this batch."""
    if len(text) > _MOST_CHARS or not text.isascii():
        return None
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    tag, body = data[:_TAG_BYTES], data[_TAG_BYTES:]
    if not body or tag != _tag(batch_id, body) or body[0] not in list(Kind):
        return None
    kind, values = Kind(body[0]), _values(body[1:])
    if len(values) != _NUM_VALUES[kind]:
        return None
    cursor = Cursor(kind, values)
    return cursor if encode(batch_id, cursor) == text else None


def _values(data: bytes) -> tuple[int, ...]:
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            values.append(value)
            value, shift = 0, 0
        elif shift > 63:
            return ()
    return () if shift or any(value >= _MOST for value in values) else tuple(values)


def _tag(batch_id: str, body: bytes) -> bytes:
    return hashlib.blake2b(batch_id.encode() + b"\0" + body, digest_size=_TAG_BYTES).digest()
