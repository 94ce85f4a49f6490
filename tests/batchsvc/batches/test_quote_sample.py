"""Estimates from samples: exact for a whole file, and an interval that holds the truth for files of many kinds."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.batches.quote_sample import Reservoir, estimate
from batchsvc.batches.window import PlannedRequest
from batchsvc.files.lines import Record
from engine.sched.order import plan_window


def request(line_no: int, tokens: list[int], fold: bool = True) -> PlannedRequest:
    return PlannedRequest(
        line_no=line_no,
        custom_id=str(line_no),
        prompt=np.array(tokens, dtype=">u4").tobytes(),
        params={"max_tokens": 4},
        fold_key=b"k" if fold else None,
    )


def uncached(requests: list[PlannedRequest]) -> int:
    """Tokens to compute, by the plan itself."""
    plan = plan_window(
        [one.prompt for one in requests],
        [one.fold_key for one in requests],
        [4] * len(requests),
        unit_lines=512,
        unit_tokens=10**6,
    )
    return sum(requests[row.members[0]].prompt_tokens - row.planned_cached_tokens for row in plan.rows)


def job(kind: str, count: int, seed: int) -> list[PlannedRequest]:
    draw = random.Random(seed)

    def words(number: int) -> list[int]:
        return [draw.randrange(4, 300) for _ in range(number)]

    system = words(200)
    groups = [words(draw.randrange(60, 120)) for _ in range(20)]
    texts = [words(draw.randrange(20, 80)) for _ in range(count // 4)]
    made = []
    for number in range(count):
        own = words(draw.randrange(5, 60))
        tokens = {
            "unique": own,
            "system": system + own,
            "groups": system[:40] + groups[number % 20] + own,
            "repeats": system + texts[number % len(texts)],
        }[kind]
        made.append(request(number + 1, tokens))
    return made


def sampled(requests: list[PlannedRequest], size: int, seed: int, windows: int = 1) -> tuple[int, int, int, bool]:
    """Low, high and truth of the uncached tokens, and whether the input tokens lie in their interval."""
    reservoir = Reservoir(size, str(seed))
    records = [Record(line_no=one.line_no, next_offset=0, value={}) for one in requests]
    drawn = [requests[record.line_no - 1] for record in reservoir.choose(records)]
    per_window = -(-len(requests) // windows)
    cut: dict[int, list[PlannedRequest]] = {}
    for one in drawn:
        cut.setdefault(reservoir.ordinal(one.line_no) // per_window, []).append(one)
    found = estimate(
        list(cut.values()), sum(map(uncached, cut.values())), drawn=len(drawn), num_lines=reservoir.num_lines
    )
    truth = sum(uncached(requests[start : start + per_window]) for start in range(0, len(requests), per_window))
    tokens = sum(one.prompt_tokens for one in requests)
    is_in = found.input_tokens.low <= tokens <= found.input_tokens.high
    assert found.uncached_tokens.low <= found.uncached_tokens.expected <= found.uncached_tokens.high
    return found.uncached_tokens.low, found.uncached_tokens.high, truth, is_in


@pytest.mark.parametrize("kind", ["unique", "system", "groups", "repeats"])
@pytest.mark.parametrize("windows", [1, 3])
def test_the_truth_lies_in_the_interval(kind: str, windows: int) -> None:
    """Two standard errors miss about one in twenty; of 8 seeded samples at least 6 must hold it, and be of use."""
    hits = tokens_hit = 0
    for seed in range(8):
        low, high, truth, is_in = sampled(job(kind, 800, seed), 120, seed, windows)
        hits += low <= truth <= high
        tokens_hit += is_in
        assert high <= 4 * truth, "an interval that says something"
    assert hits >= 6 and tokens_hit >= 6


prompts = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=40), min_size=1, max_size=8)


@settings(max_examples=50)
@given(prompts, st.booleans())
def test_a_sample_of_all_lines_is_exact(prompts: list[list[int]], fold: bool) -> None:
    requests = [request(number + 1, tokens, fold) for number, tokens in enumerate(prompts)]
    truth = uncached(requests)
    found = estimate([requests], truth, drawn=len(requests), num_lines=len(requests))
    tokens = sum(len(one) for one in prompts)
    for interval, exact in ((found.input_tokens, tokens), (found.uncached_tokens, truth)):
        assert (interval.low, interval.expected, interval.high) == (exact, exact, exact)


def test_nothing_that_can_run_costs_nothing() -> None:
    found = estimate([], 0, drawn=5, num_lines=50)
    assert (found.lines, found.input_tokens.high, found.uncached_tokens.high) == (0, 0, 0)


def test_each_line_is_as_likely_as_any_other() -> None:
    """10 of 100 lines, 1,000 times: each is drawn 100 times on average (standard deviation 9.5)."""
    records = [Record(line_no=number, next_offset=0, value={}) for number in range(1, 101)]
    drawn: Counter[int] = Counter()
    for seed in range(1_000):
        chosen = [record.line_no for record in Reservoir(10, str(seed)).choose(records)]
        assert len(chosen) == 10 and chosen == sorted(chosen)
        drawn.update(chosen)
    assert len(drawn) == 100 and min(drawn.values()) > 52 and max(drawn.values()) < 148
    assert list(Reservoir(200, "s").choose(records)) == records
