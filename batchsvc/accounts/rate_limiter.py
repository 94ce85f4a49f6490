"""Counts requests of keys and projects: in Redis, which all API processes share, and here, in case Redis is lost.

1. The bucket of this process is asked first: it holds what came through this process alone, so it never refuses what
   the shared one would let pass.
2. Then Redis counts, in one round trip for all buckets of a request, in all of them or in none.
3. Where Redis doesn't answer within a quarter of a second, what step 1 said stands. So a lost, wiped or full Redis
   leaves each process with the limit, not without one; and no request fails for it. One request a second asks again.

Why no library: `limits` has no cell rate algorithm and takes a round trip for each bucket and each figure of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib.resources import files

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from batchsvc.accounts.limits import Bucket, Verdict, has_room, verdict
from batchsvc.clock import monotonic_s

_KEY = "batchsvc:rate:"
_REACH_S = 0.25
_AGAIN_S = 1.0
_MANY = 10_000  # buckets here, of which those that are full are forgotten

log = structlog.get_logger(__name__)


class RateLimiter:
    """The limiter of one process; every method may be called from any thread, and none raises."""

    def __init__(self, redis_url: str, *, clock_s: Callable[[], float] = monotonic_s) -> None:
        self._redis = redis.Redis.from_url(
            redis_url, socket_timeout=_REACH_S, socket_connect_timeout=_REACH_S, retry=Retry(NoBackoff(), 0)
        )
        script = files("batchsvc.accounts").joinpath("rate_limit.lua").read_text(encoding="utf-8")
        self._script = self._redis.register_script(script)
        self._clock_s = clock_s
        self._local = LocalBuckets()
        self._lock = threading.Lock()
        self._lost_until_s: float | None = None  # None: the last one who asked Redis was answered

    def take(self, buckets: Sequence[Bucket]) -> Verdict:
        """Count one request in all of the buckets, at least one, if each has room for it."""
        here = self._local.take(buckets, self._now_us())
        if not here.is_allowed or not self._may_ask():
            return here
        shared = self._ask(buckets)
        if shared is None:
            return here
        if not shared.is_allowed:
            self._local.give_back(buckets)
        return shared

    def close(self) -> None:
        self._redis.close()

    def _may_ask(self) -> bool:
        """Whether Redis is asked: while it is lost, by one request a second."""
        with self._lock:
            if self._lost_until_s is None:
                return True
            if self._clock_s() < self._lost_until_s:
                return False
            self._lost_until_s = self._clock_s() + _AGAIN_S
            return True

    def _ask(self, buckets: Sequence[Bucket]) -> Verdict | None:
        try:
            answer = self._script(
                keys=[_KEY + bucket.name for bucket in buckets],
                args=[us for bucket in buckets for us in (bucket.step_us, bucket.size_us)],
            )
        except (redis.RedisError, OSError) as error:
            with self._lock:
                is_news, self._lost_until_s = self._lost_until_s is None, self._clock_s() + _AGAIN_S
            if is_news:
                log.warning("limits.local", error=type(error).__name__)
            return None
        with self._lock:
            is_news, self._lost_until_s = self._lost_until_s is not None, None
        if is_news:
            log.info("limits.shared")
        is_counted, *debts_us = (int(number) for number in answer)
        return verdict(buckets, debts_us, is_allowed=bool(is_counted))

    def _now_us(self) -> int:
        return int(self._clock_s() * 1_000_000)


class LocalBuckets:
    """The buckets of one process, each known by the moment at which it is full again."""

    def __init__(self) -> None:
        self._full_us: dict[str, int] = {}
        self._lock = threading.Lock()

    def take(self, buckets: Sequence[Bucket], now_us: int) -> Verdict:
        """Count one request in all of the buckets, or in none."""
        with self._lock:
            debts = [max(0, self._full_us.get(bucket.name, 0) - now_us) for bucket in buckets]
            is_allowed = all(has_room(bucket, debt) for bucket, debt in zip(buckets, debts, strict=True))
            if is_allowed:
                debts = [debt + bucket.step_us for bucket, debt in zip(buckets, debts, strict=True)]
                self._full_us |= {bucket.name: now_us + debt for bucket, debt in zip(buckets, debts, strict=True)}
            if len(self._full_us) > _MANY:
                self._full_us = {name: full for name, full in self._full_us.items() if full > now_us}
        return verdict(buckets, debts, is_allowed=is_allowed)

    def give_back(self, buckets: Sequence[Bucket]) -> None:
        """Uncount a request that was counted here and refused elsewhere."""
        with self._lock:
            for bucket in buckets:
                if bucket.name in self._full_us:
                    self._full_us[bucket.name] -= bucket.step_us
