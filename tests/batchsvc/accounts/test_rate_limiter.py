"""Requests are counted alike in Redis and here; a Redis that is lost, wiped, deaf or full leaves the limit standing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from batchsvc import ids
from batchsvc.accounts.limits import MINUTE_US, NO_LIMITS, Bucket, Limits, duration
from batchsvc.accounts.rate_limiter import LocalBuckets, RateLimiter
from tests.faults.own_valkey import OwnValkey
from tests.faults.proxy import FaultProxy


class Clock:
    """A clock that a test puts forward, and that goes on with the true one."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[OwnValkey]:
    server = OwnValkey(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def limiter(redis_url: str) -> Iterator[RateLimiter]:
    made = RateLimiter(redis_url)
    yield made
    made.close()


def bucket(requests_per_minute: int) -> Bucket:
    """One that nobody has used: it refills slowly beside the time that a test takes, if the number is small."""
    return Bucket(ids.random_text(12), requests_per_minute)


def allowed(limiter: RateLimiter, times: int, *buckets: Bucket) -> int:
    return sum(limiter.take(buckets).is_allowed for _ in range(times))


@given(limit=st.integers(1, 50), waits_us=st.lists(st.integers(0, 2 * MINUTE_US), max_size=100))
def test_a_bucket_holds_a_minutes_requests_and_refills_evenly(limit: int, waits_us: list[int]) -> None:
    """Against the plain picture: so many tokens, one more every so often, one taken by each request."""
    buckets, one, now_us = LocalBuckets(), Bucket("b", limit), MINUTE_US
    steps_us = limit * one.step_us  # tokens in units of time, so that the picture has no fractions
    for wait_us in waits_us:
        now_us += wait_us
        steps_us = min(limit * one.step_us, steps_us + wait_us)
        may = steps_us >= one.step_us
        steps_us -= one.step_us if may else 0
        said = buckets.take([one], now_us)
        assert said.is_allowed == may
        assert (said.remaining, said.reset_us) == (steps_us // one.step_us, limit * one.step_us - steps_us)
        assert may or said.wait_us == one.step_us - steps_us


@given(small=st.integers(1, 5), large=st.integers(6, 50), tries=st.integers(0, 20))
def test_a_refused_request_counts_nowhere(small: int, large: int, tries: int) -> None:
    buckets, both = LocalBuckets(), [Bucket("small", small), Bucket("large", large)]
    passed = sum(buckets.take(both, 0).is_allowed for _ in range(tries))
    assert passed == min(tries, small)
    if tries:
        assert buckets.take(both[1:], 0).remaining == large - passed - 1


def test_a_limit_of_a_project_is_its_own_or_the_settings() -> None:
    own = Limits(requests_per_minute=5, max_stored_bytes=0)
    setting = Limits(requests_per_minute=9, max_open_batches=2, max_stored_bytes=7)
    assert own.or_else(setting) == Limits(requests_per_minute=5, max_open_batches=2, max_stored_bytes=0)
    assert NO_LIMITS.or_else(setting) == setting


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0ms"), (1, "1ms"), (999_000, "999ms"), (999_001, "1s"), (59_000_000, "59s"), (59_000_001, "1m0s")],
)
def test_times_are_spelled_as_openai_does(us: int, text: str) -> None:
    assert duration(us) == text


def test_redis_counts_in_all_buckets_or_in_none(limiter: RateLimiter, redis_url: str) -> None:
    small, large = bucket(3), bucket(10)
    assert allowed(limiter, 5, small, large) == 3
    refused = limiter.take([small, large])
    assert (refused.limit, refused.remaining) == (3, 0) and refused.wait_us > 0
    other = RateLimiter(redis_url)  # another process: it knows nothing but what Redis says
    assert other.take([large]).remaining == 6
    assert not other.take([small]).is_allowed
    assert other.take([small, large]).headers["x-ratelimit-limit-requests"] == "3"
    other.close()
    with redis.Redis.from_url(redis_url) as client:
        assert client.pttl(f"batchsvc:rate:{small.name}") > 0, "no bucket stays for ever"


def test_processes_that_count_at_once_share_one_limit(redis_url: str) -> None:
    limiters, shared = [RateLimiter(redis_url) for _ in range(4)], bucket(40)
    began_s = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        passed = sum(pool.map(lambda n: limiters[n % 4].take([shared]).is_allowed, range(200)))
    refilled = int((time.monotonic() - began_s) * 40 / 60) + 1
    assert 40 <= passed <= 40 + refilled
    for one in limiters:
        one.close()


def test_a_lost_redis_leaves_each_process_with_the_limit(valkey: OwnValkey) -> None:
    clock, few = Clock(), bucket(5)
    limiter = RateLimiter(valkey.url, clock_s=clock)
    assert allowed(limiter, 2, few) == 2
    valkey.kill()
    assert allowed(limiter, 10, few) == 3, "what came before counts here, too"
    valkey.start()  # empty
    clock.ahead_s = 1.5  # so that it is asked again
    assert not limiter.take([few]).is_allowed, "nor does an empty one give the limit anew"
    again = bucket(5)
    assert limiter.take([again]).is_allowed
    other = RateLimiter(valkey.url)
    assert other.take([again]).remaining == 3, "they count together again"
    for one in (limiter, other):
        one.close()


def _wipe(valkey: OwnValkey, _proxy: FaultProxy) -> None:
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
        client.script_flush()


def _fill(valkey: OwnValkey, _proxy: FaultProxy) -> None:
    valkey.fill()


def _make_deaf(_valkey: OwnValkey, proxy: FaultProxy) -> None:
    proxy.black_hole()


@pytest.mark.parametrize("happens", [_wipe, _fill, _make_deaf])
def test_a_redis_that_forgets_refuses_or_hangs_opens_nothing(
    valkey: OwnValkey, happens: Callable[[OwnValkey, FaultProxy], None]
) -> None:
    host, port = "127.0.0.1", int(valkey.url.rpartition(":")[2].partition("/")[0])
    few = bucket(4)
    with FaultProxy((host, port)) as proxy:
        limiter = RateLimiter(valkey.url.replace(f":{port}/", f":{proxy.port}/"))
        assert allowed(limiter, 3, few) == 3
        happens(valkey, proxy)
        assert allowed(limiter, 5, few) == 1
        limiter.close()
