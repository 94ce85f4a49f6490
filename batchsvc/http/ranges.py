"""The header `Range` of one span of bytes, as RFC 9110 reads it."""

from __future__ import annotations

import re

_FORM = re.compile(r"bytes=([0-9]*)-([0-9]*)")
_MOST_DIGITS = 18  # no object is as long, and Python reads no number of thousands of digits


class UnsatisfiableRangeError(Exception):
    """The span starts at or after the end of the object."""


def span(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """The bytes [start, end) that are asked for; None means all, as for a form that we needn't understand."""
    found = _FORM.fullmatch(header.strip()) if header else None
    if found is None or found[0] == "bytes=-":
        return None
    first, last = found[1], found[2]
    if not first:
        start, end = max(0, size_bytes - _number(last)), size_bytes
    else:
        start, end = _number(first), min(_number(last) + 1, size_bytes) if last else size_bytes
        if last and _number(last) < start:
            return None
    if start >= size_bytes:
        raise UnsatisfiableRangeError
    return start, end


def _number(digits: str) -> int:
    """What the digits say, or more than any object has."""
    digits = digits.lstrip("0")
    return int(digits or "0") if len(digits) <= _MOST_DIGITS else 10**_MOST_DIGITS
