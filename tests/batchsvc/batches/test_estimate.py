"""The end told at 25, 50 and 75 % is the one that comes: twenty simulated batches with mixed lengths and kills."""

from __future__ import annotations

import pytest

from batchsvc.batches import estimate
from batchsvc.batches.estimate import AnyTime, Habits, Neighbour
from batchsvc.batches.progress import Sample, Work
from tests.batchsvc.batches.batch_sim import MARKS, Outcome, Scenario, Simulation, mixed

HABITS = Habits(flush_ms=500, death_ms=4_000, tick_ms=500)


def covered(outcomes: list[Outcome], mark: int) -> int:
    hits = 0
    for outcome in outcomes:
        reading = outcome.readings.get(mark)
        if reading is not None and reading.interval is not None:
            hits += reading.interval.low_ms <= outcome.end_ms <= reading.interval.high_ms
    return hits


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [Simulation(mixed(seed)).run() for seed in range(20)]


@pytest.mark.parametrize("mark", MARKS)
def test_the_real_end_lies_in_the_interval(outcomes: list[Outcome], mark: int) -> None:
    assert covered(outcomes, mark) >= 16


def test_shares_never_fall_and_are_read_at_every_mark(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.shares == sorted(outcome.shares)
        assert set(outcome.readings) == set(MARKS)


def test_intervals_are_narrow_enough_to_plan_by(outcomes: list[Outcome]) -> None:
    """At 75 %, the latest end of the median batch is less than twice as far away as it was so far from its start."""
    spans = []
    for outcome in outcomes:
        reading = outcome.readings[750_000]
        assert reading.interval is not None
        spans.append((reading.interval.high_ms - reading.at_ms) / reading.at_ms)
    assert sorted(spans)[len(spans) // 2] < 1.0


def test_a_neighbour_that_shares_the_workers_is_reckoned_with() -> None:
    """It takes half of the workers until 200 s; at a quarter of the way that is known, and what it leaves then."""
    lengths = [200] * 400
    scenario = Scenario(
        seed=1, lengths=lengths, predicted=lengths, engine_speed=200, habits=HABITS, neighbour=(0, 200_000, 0.5)
    )
    outcome = Simulation(scenario).run()
    reading = outcome.readings[250_000]
    assert reading.at_ms < 200_000 and reading.interval is not None
    assert reading.interval.low_ms <= outcome.end_ms <= reading.interval.high_ms


def test_silence_moves_the_end_away() -> None:
    work = Work(est_tokens=10_000, lines=100, finished_tokens=5_000, took_tokens=5_000, sure_tokens=10_000)
    samples = [Sample(1_000 * second, 100 * second) for second in range(51)]
    ends = [estimate.lines_end(work, samples, HABITS, AnyTime(), now) for now in (50_000, 80_000, 200_000)]
    assert all(end is not None for end in ends)
    lasts = [end.high_ms - now for end, now in zip(ends, (50_000, 80_000, 200_000), strict=True) if end is not None]
    assert lasts == sorted(lasts) and lasts[-1] > 2 * lasts[0]


def test_those_ahead_make_the_latest_end_later_and_sharers_the_earliest_sooner() -> None:
    work = Work(est_tokens=10_000, lines=100, finished_tokens=5_000, took_tokens=5_000, sure_tokens=10_000)
    samples = [Sample(1_000 * second, 100 * second) for second in range(51)]
    alone = estimate.lines_end(work, samples, HABITS, AnyTime(), 50_000)
    ahead = Neighbour(left_tokens=50_000, rate=0.0, is_ahead=True)
    behind = estimate.lines_end(work, samples, HABITS, AnyTime(), 50_000, neighbours=[ahead])
    sharer = Neighbour(left_tokens=100, rate=0.1, is_ahead=False)
    shared = estimate.lines_end(work, samples, HABITS, AnyTime(), 50_000, neighbours=[sharer])
    assert alone is not None and behind is not None and shared is not None
    assert behind.high_ms > alone.high_ms + 400_000 and behind.low_ms == alone.low_ms
    assert shared.low_ms < alone.low_ms
