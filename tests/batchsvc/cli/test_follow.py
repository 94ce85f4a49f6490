"""What progress says: rates from the first look at running work, the share of cached tokens, the time left."""

from __future__ import annotations

from typing import Any

from batchsvc.cli.follow import Meter, clock


def look(status: str, done: int, *, total: int = 100, tokens: int = 0, cached: int = 0) -> dict[str, Any]:
    usage = {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": tokens,
        "total_tokens": 2 * tokens,
        "cost_nanos": 1_500_000,
    }
    return {"status": status, "request_counts": {"total": total, "completed": done, "failed": 0}, "usage": usage}


def test_rates_count_from_the_start_of_the_work() -> None:
    times = iter([10.0, 10.0, 20.0])
    meter = Meter(lambda: next(times))
    assert meter.look(look("validating", 0, total=0)).numbers() == ""  # reads no clock yet
    first = meter.look(look("in_progress", 20, tokens=500))
    assert (first.tokens_per_s, first.left_s) == (0.0, None)
    later = meter.look(look("in_progress", 60, tokens=1500, cached=750))
    assert later.tokens_per_s == 200.0
    assert later.left_s == 10.0
    assert later.numbers() == "60 of 100 lines, 0 failed, 200 tokens/s, 50 % cached, $0.0015, 0:10 left"


def test_a_batch_without_a_worker_says_so() -> None:
    batch = {**look("in_progress", 0), "waiting_for": "no worker for model X"}
    assert Meter(lambda: 0.0).look(batch).numbers() == "waiting for: no worker for model X"


def test_clock() -> None:
    assert [clock(0), clock(59.6), clock(3600 + 61)] == ["0:00", "1:00", "1:01:01"]
