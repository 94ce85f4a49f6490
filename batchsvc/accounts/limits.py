"""What a key or a project may do at most, and when a request is too many. Pure.

Requests are counted by the generic cell rate algorithm: a bucket holds the requests of one minute and is refilled
evenly, so a limit of 60 lets 60 through at once and then one a second. Its whole state is one moment, the one at which
it will be full again; rate_limit.lua does the same arithmetic in Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MINUTE_US = 60_000_000
MOST_PER_MINUTE = 6_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a key, or of all keys of a project together. None: no limit."""

    requests_per_minute: int | None = None
    max_open_batches: int | None = None
    max_stored_bytes: int | None = None

    def or_else(self, other: Limits) -> Limits:
        """These, and where there is none the other's."""
        mine, its = self, other
        return Limits(
            requests_per_minute=_first(mine.requests_per_minute, its.requests_per_minute),
            max_open_batches=_first(mine.max_open_batches, its.max_open_batches),
            max_stored_bytes=_first(mine.max_stored_bytes, its.max_stored_bytes),
        )


NO_LIMITS = Limits()


class Bucket(NamedTuple):
    """Somebody whose requests are counted, and how many they may make in a minute."""

    name: str
    requests_per_minute: int

    @property
    def step_us(self) -> int:
        """How long it takes to refill by one request."""
        return max(1, MINUTE_US // self.requests_per_minute)

    @property
    def size_us(self) -> int:
        """How long it takes to refill an empty one."""
        return self.step_us * self.requests_per_minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a request may pass, and what its caller is told of the tightest bucket."""

    is_allowed: bool
    limit: int
    remaining: int
    reset_us: int  # until that bucket is full again
    wait_us: int = 0  # of a refused one: until it could pass

    @property
    def headers(self) -> dict[str, str]:
        """As OpenAI spells them."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": duration(self.reset_us),
        }


def has_room(bucket: Bucket, debt_us: int) -> bool:
    """Whether a bucket that will be full in `debt_us` has room for one more request."""
    return debt_us + bucket.step_us <= bucket.size_us


def verdict(buckets: Sequence[Bucket], debts_us: Sequence[int], *, is_allowed: bool) -> Verdict:
    """What to tell the caller, from when each bucket will be full after the request was counted, or refused."""
    pairs = list(zip(buckets, debts_us, strict=True))
    bucket, debt_us = min(pairs, key=lambda pair: _remaining(*pair) / pair[0].requests_per_minute)
    waits = [debt + one.step_us - one.size_us for one, debt in pairs]
    return Verdict(
        is_allowed=is_allowed,
        limit=bucket.requests_per_minute,
        remaining=_remaining(bucket, debt_us),
        reset_us=debt_us,
        wait_us=0 if is_allowed else max(0, *waits),
    )


def duration(us: int) -> str:
    """A time as OpenAI's headers have it: 120ms, 1s, 6m0s."""
    ms = -(-us // 1000)
    if ms < 1000:
        return f"{ms}ms"
    seconds = -(-ms // 1000)
    return f"{seconds}s" if seconds < 60 else f"{seconds // 60}m{seconds % 60}s"


def _remaining(bucket: Bucket, debt_us: int) -> int:
    return max(0, (bucket.size_us - debt_us) // bucket.step_us)


def _first(mine: int | None, other: int | None) -> int | None:
    return other if mine is None else mine
