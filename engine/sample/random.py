"""Random numbers as a function of what they are for, so that no draw depends on the batch around it; no torch."""

from __future__ import annotations

import struct
from enum import IntEnum
from hashlib import blake2b

_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a number is drawn for: two purposes at one position never share a draw."""

    SAMPLE = 0


def uniform(seed: int, choice: int, position: int, purpose: Purpose) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same arguments on every machine."""
    key = struct.pack("<QQQQ", seed & _MASK, choice, position, purpose)
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53
