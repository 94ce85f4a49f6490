"""Conditions of a request on the version of what it asks for, as RFC 9110 reads them: If-None-Match and If-Range."""

from __future__ import annotations

import re

_TAG = re.compile(r'(?:W/)?"([\x21\x23-\x7e\x80-\xff]*)"')


def is_unchanged(if_none_match: str | None, tag: str) -> bool:
    """Whether the caller has this version already: 304. Weak tags compare as strong ones do."""
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or tag in _TAG.findall(if_none_match)


def is_range_meant(if_range: str | None, tag: str) -> bool:
    """Whether a Range may be honoured. A date or a weak tag names no version surely, so then the whole is answered."""
    return if_range is None or if_range.strip() == f'"{tag}"'
