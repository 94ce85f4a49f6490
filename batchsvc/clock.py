"""The only place that reads the clock of the host. Leases and deadlines use the database's time instead."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Wall-clock time in milliseconds since the epoch."""
    return now_ns() // 1_000_000


def now_ns() -> int:
    """The same in nanoseconds."""
    return time.time_ns()


def monotonic_s() -> float:
    """Seconds that never go backwards: for self-fencing and back-off."""
    return time.monotonic()
