"""What progress says: rates from the first look at running work, the share of cached tokens, the time left."""

from __future__ import annotations

from typing import Any

from batchsvc.cli.follow import Meter, clock


def look(status: str, done: int, *, total: int = 100, tokens: int = 0, cached: int = 0, **more: Any) -> dict[str, Any]:
    usage = {
        "input_tokens": tokens,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": tokens,
        "total_tokens": 2 * tokens,
        "cost_nanos": 1_500_000,
    }
    counts = {"total": total, "completed": done, "failed": 0}
    return {"status": status, "request_counts": counts, "usage": usage, **more}


def test_rates_count_from_the_start_of_the_work() -> None:
    times = iter([10.0, 10.0, 20.0])
    meter = Meter(lambda: next(times))
    assert meter.look(look("validating", 0, total=0)).numbers() == ""  # reads no clock yet
    first = meter.look(look("in_progress", 20, tokens=500))
    assert (first.tokens_per_s, first.left) == (0.0, None)
    later = meter.look(look("in_progress", 60, tokens=1500, cached=750))
    assert later.tokens_per_s == 200.0
    assert later.numbers() == "60 of 100 lines, 0 failed, 200 tokens/s, 50 % cached, $0.0015"


def test_share_and_end_are_what_the_service_says() -> None:
    meter = Meter(lambda: 0.0, lambda: 1_000.0)
    more: dict[str, Any] = {
        "progress": {"phase": "running", "share": 0.4399},
        "estimated_completion_at": {"low": 1_010, "high": 1_090},
    }
    seen = meter.look(look("in_progress", 60, **more))
    assert seen.numbers() == "43 %, 60 of 100 lines, 0 failed, 0 tokens/s, 0 % cached, $0.0015, 0:10 to 1:30 left"
    late = meter.look(look("in_progress", 60, at_risk=True, estimated_completion_at={"low": 990, "high": 1_000}))
    assert late.numbers().endswith("$0.0015, 0:00 left, the deadline is at risk")


def test_a_batch_without_a_worker_says_so() -> None:
    batch = {**look("in_progress", 0), "waiting_for": "no worker for model X"}
    assert Meter(lambda: 0.0).look(batch).numbers() == "waiting for: no worker for model X"


def test_clock() -> None:
    assert [clock(0), clock(59.6), clock(3600 + 61)] == ["0:00", "1:00", "1:01:01"]
