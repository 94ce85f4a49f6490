"""Durations, limits and moments as options of operators' commands spell them; pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from batchsvc.cli.exits import CommandError, Exit

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_BYTES = re.compile(r"(\d{1,15})\s?([KMGT]i?B?|B)?", re.ASCII | re.IGNORECASE)
_POWERS = "BKMGT"


def seconds(option: str, text: str) -> int:
    """A duration such as 90s, 30m, 24h or 90d. Raises CommandError for anything else."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise CommandError(f"{option} can't be {text!r}: it is a duration such as 30m, 24h or 90d.", Exit.USAGE)
    return int(found[1]) * _UNITS[found[2]]


def seconds_or_never(option: str, text: str) -> int | None:
    """A duration, or `never`."""
    return None if text == "never" else seconds(option, text)


def limit(option: str, text: str) -> int | None:
    """A number, or `none` for no limit of its own."""
    if text == "none":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise CommandError(f"{option} can't be {text!r}: it is a number, or none.", Exit.USAGE)
    return int(text)


def byte_limit(option: str, text: str) -> int | None:
    """A number of bytes such as 500GB, 20GiB or 1000000, or `none`."""
    if text == "none":
        return None
    found = _BYTES.fullmatch(text)
    if found is None:
        raise CommandError(f"{option} can't be {text!r}: it is bytes such as 500GB or 20GiB, or none.", Exit.USAGE)
    unit = (found[2] or "B").upper()
    step = 1024 if "I" in unit else 1000
    return int(int(found[1]) * step ** _POWERS.index(unit[0]))


def moment_s(option: str, text: str, now_s: int) -> int:
    """A moment in seconds since the epoch: a date or a time in UTC such as 2026-01-31T08:00, or how long ago: 24h."""
    if _DURATION.fullmatch(text):
        return now_s - seconds(option, text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise CommandError(
            f"{option} can't be {text!r}: it is a date or time in UTC such as 2026-01-31T08:00, or how long ago, such "
            "as 24h.",
            Exit.USAGE,
        ) from error
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
