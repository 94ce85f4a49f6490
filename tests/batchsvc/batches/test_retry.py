"""Retries of lines: three attempts, a budget a batch, delays that grow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import retry


@given(st.dictionaries(st.integers(0, 511), st.integers(1, 5)), st.integers(-5, 600))
def test_every_line_is_settled_within_attempts_and_budget(failures: dict[int, int], left: int) -> None:
    verdict = retry.judge(failures, left)
    assert verdict.again | verdict.failed == set(failures) and not verdict.again & verdict.failed
    assert all(failures[bit] < retry.MOST_ATTEMPTS for bit in verdict.again)
    may = sum(failed < retry.MOST_ATTEMPTS for failed in failures.values())
    assert len(verdict.again) == max(0, min(left, may))


def test_the_budget_is_a_tenth_and_fifty() -> None:
    assert [retry.budget(lines) for lines in (0, 9, 1_000, 1_000_000)] == [50, 50, 150, 100_050]


@given(st.integers(1, 40), st.floats(0, 1))
def test_delays_grow_up_to_a_minute_with_full_jitter(failed: int, jitter: float) -> None:
    assert retry.delay_s(failed, 1.0) == min(60.0, 2.0 ** (failed - 1))
    assert 0 <= retry.delay_s(failed, jitter) <= retry.delay_s(failed, 1.0)
