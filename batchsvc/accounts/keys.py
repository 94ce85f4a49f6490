"""API keys as text: made, taken apart, hashed and compared; no database.

A key is `sk_<id>_<secret><crc>`, and in test mode `sk_test_<id>_<secret><crc>`: 8 public characters to look it up by,
43 random ones (256 bits) and a CRC-32 over all that stands before it, in 6 characters. The CRC lets secret scanners,
and us, tell a key from a string that only looks like one. What is stored is SHA-256 of the text: of 256 random bits
nothing slower is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import zlib
from dataclasses import dataclass

from batchsvc.ids import random_text

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FORM = re.compile(r"sk_(?:test_)?([0-9A-Za-z]{8})_[0-9A-Za-z]{43}([0-9A-Za-z]{6})")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. `text` is shown once; the database keeps `id` and `hash`."""

    id: str
    text: str
    hash: str


def make(*, is_test: bool = False) -> NewKey:
    """A fresh key. Those of test mode show it in their text."""
    key_id = random_text(8)
    body = f"sk_{'test_' if is_test else ''}{key_id}_{random_text(43)}"
    text = body + _crc(body)
    return NewKey(key_id, text, digest(text))


def id_of(text: str) -> str | None:
    """The id inside a key, or None if this isn't the text of a key."""
    found = _FORM.fullmatch(text)
    return found[1] if found and found[2] == _crc(text[:-6]) else None


def digest(text: str) -> str:
    """What the database keeps of a key."""
    return hashlib.sha256(text.encode()).hexdigest()


def matches(text: str, stored: str) -> bool:
    """Whether this key has the stored hash, in constant time."""
    return hmac.compare_digest(digest(text), stored)


def _crc(body: str) -> str:
    value, out = zlib.crc32(body.encode()), ""
    for _ in range(6):
        value, digit = divmod(value, len(_ALPHABET))
        out = _ALPHABET[digit] + out
    return out
