"""The circuit breaker of a worker: who notices that the store or the database doesn't answer, and when to try again.

Reads (claims and unit files), writes (parts) and leases fail and recover each for themselves. While any of them fails
the worker claims nothing and feeds nothing to its engine, so what waits to be written stays bounded; nothing is given
back for it, and no attempt of a line or a unit is counted. It goes on as soon as all of them were seen to work again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Literal

from batchsvc.clock import monotonic_s

Way = Literal["reads", "writes", "leases"]

_RETRY_S = 0.2
_RETRY_MOST_S = 5.0


class Breaker:
    """Counts failures in a row by way. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = monotonic_s, draw: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._failures: dict[Way, int] = {}
        self._retry_s: dict[Way, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether anything failed that hasn't worked since."""
        return bool(self._failures)

    def is_failing(self, way: Way) -> bool:
        return way in self._failures

    def failed(self, way: Way) -> float:
        """Note a failure; returns how long to wait: longer each time in a row, and never in step with others."""
        with self._lock:
            count = self._failures[way] = self._failures.get(way, 0) + 1
            wait_s = min(_RETRY_MOST_S, _RETRY_S * 2.0 ** min(count, 8)) * (0.5 + self._draw() / 2)
            self._retry_s[way] = self._clock() + wait_s
        return wait_s

    def worked(self, way: Way) -> None:
        with self._lock:
            self._failures.pop(way, None)
            self._retry_s.pop(way, None)

    def retry_s(self, way: Way) -> float:
        """Monotonic time before which not to try again."""
        return self._retry_s.get(way, 0.0)

    def may_try(self, way: Way) -> bool:
        return self._clock() >= self.retry_s(way)
