"""The gate takes the windows with the most tokens for their time; odds and costs learn what is measured."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.sequence import Sequence, SequenceState
from engine.spec.costs import ROW_SHARE, StepCosts, seconds
from engine.spec.gate import MARGIN, window_lengths
from engine.spec.odds import Odds
from engine.spec.proposer import Grades
from engine.spec.speculation import MOST_SEQUENCES, Speculation
from tests.engine.oracle import request
from tests.engine.spec.guesser import SimpleProposer

chances = st.lists(st.floats(0, 1), max_size=4)


def expected(odds: list[list[float]], lengths: list[int]) -> float:
    """Draft tokens that turn out right."""
    total = 0.0
    for own, length in zip(odds, lengths, strict=True):
        all_right = 1.0
        for chance in own[:length]:
            all_right *= chance
            total += all_right
    return total


@given(
    odds=st.lists(chances, min_size=1, max_size=3),
    others=st.integers(0, 4),
    most=st.integers(0, 12),
    slope=st.floats(0.001, 2),
)
def test_no_other_windows_bring_more_tokens_for_their_time(
    odds: list[list[float]], others: int, most: int, slope: float
) -> None:
    decodes = len(odds) + others

    def rate(lengths: list[int]) -> float:
        return (decodes + expected(odds, lengths)) / (1 + slope * (decodes + sum(lengths)))

    lengths = window_lengths(odds, decodes, most, lambda rows: 1 + slope * rows)
    assert sum(lengths) <= most and all(n <= len(own) for n, own in zip(lengths, odds, strict=True))
    every = [list(sizes) for sizes in product(*(range(len(own) + 1) for own in odds)) if sum(sizes) <= most]
    best = max(map(rate, every))
    none = rate([0] * len(odds))
    if sum(lengths):
        assert rate(lengths) == pytest.approx(best) and best > MARGIN * none
    else:
        assert best <= MARGIN * none * (1 + 1e-9)


def test_windows_are_long_alone_and_none_where_rows_cost_what_they_bring() -> None:
    sure = [0.9] * 15

    def cost(rows: int) -> float:
        return 1 + rows / 16

    assert sum(window_lengths([sure], 1, 63, cost)) > 5
    assert sum(window_lengths([sure], 24, 40, lambda rows: float(rows))) == 0
    assert window_lengths([[0.02] * 5, sure], 2, 62, cost)[0] == 0
    assert window_lengths([], 0, 4, cost) == []


def test_costs_are_what_was_measured_and_a_guess_beyond_it() -> None:
    costs = StepCosts()
    assert seconds(costs.curve(), 9) / seconds(costs.curve(), 1) == pytest.approx((1 + 9 * ROW_SHARE) / (1 + ROW_SHARE))
    for _ in range(50):
        costs.observe(1, 0.010)
    assert seconds(costs.curve(), 1) == pytest.approx(0.010)
    assert 0.010 < seconds(costs.curve(), 8) < 0.020
    for _ in range(50):
        costs.observe(8, 0.030)
    assert seconds(costs.curve(), 8) == pytest.approx(0.030)
    assert 0.010 < seconds(costs.curve(), 4) < 0.030
    costs.observe(8, 10.0)
    assert seconds(costs.curve(), 8) < 0.050, "something else ran"
    for _ in range(2000):
        costs.observe(1, 0.010)
    assert seconds(costs.curve(), 8) < 0.020, "what was measured long ago is forgotten"


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-4, 1.0)), max_size=40))
def test_more_rows_never_cost_less(seen: list[tuple[int, float]]) -> None:
    costs = StepCosts()
    for rows, took in seen:
        costs.observe(rows, took)
    curve = costs.curve()
    found = [seconds(curve, rows) for rows in range(1, 65)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(found)) and found[0] > 0


def test_odds_follow_what_came_for_a_grade_and_for_a_sequence() -> None:
    odds, token_ids, grades = Odds((0.5, 0.5)), (1, 2, 3), (0, 0, 1)
    good, bad = (Sequence(request(name, [9], 1000), 0, 1000) for name in ("good", "bad"))
    before = odds.of("new", grades)
    assert before == [0.5] * 3
    for _ in range(40):
        odds.note(good, token_ids, grades)
        odds.note(bad, token_ids, grades)
        good.tokens += [1, 2, 8]  # two right, the third wrong
        bad.tokens += [7]
        odds.look_back(good)
        odds.look_back(bad)
    assert odds.of("good", grades)[0] > 0.55 > 0.3 > odds.of("bad", grades)[0]
    fresh = odds.of("new", grades)
    assert fresh[0] > 0.5 > fresh[2], "only the place that was wrong counts against its grade"
    odds.look_back(good)
    assert odds.of("new", grades) == fresh, "each proposal counts once"
    odds.forget("good")
    assert odds.of("good", grades) == fresh


class Hopeless(SimpleProposer):
    """Was never right: only a trial asks it."""

    first_odds = (0.0,)

    def look(self, sequences: Iterable[Sequence], most_tokens: Iterable[int]) -> list[Grades]:
        return [(0,) * most for most in most_tokens]

    def cost(self, lengths: Iterable[int]) -> float:
        return 1.0

    def guess(self, seq: Sequence, length: int) -> tuple[int, ...]:
        return (7,) * length


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_was_given_up_is_tried_again(overlaps: bool) -> None:
    """Also where steps overlap, whose tokens are known only when somebody asked for them before."""
    speculation = Speculation(Hopeless())
    seq = Sequence(request("r", [4, 5], 10_000), 0, 10_000)
    seq.state, seq.computed_tokens = SequenceState.RUNNING, 1
    trials = []
    for step in range(1, 1100):
        seq.num_unread = 0 if not overlaps or speculation.wants_tokens(1) else 1
        if speculation.drafts([seq], 64):
            trials.append(step)
    assert 3 <= len(trials) <= 4
    assert min(b - a for a, b in pairwise(trials)) >= 256


class Sure(SimpleProposer):
    """Always has a token, and is always drafted from."""

    def look(self, sequences: Iterable[Sequence], most_tokens: Iterable[int]) -> list[Grades]:
        return [(0,) * most for most in most_tokens]

    def guess(self, seq: Sequence, length: int) -> tuple[int, ...]:
        return (7,) * length


def test_a_full_batch_has_no_drafts() -> None:
    """Whatever is proposed, and nothing waits for tokens to look at there."""
    speculation = Speculation(Sure(), is_gated=False)
    running = [Sequence(request(str(number), [4, 5], 100), 0, 100) for number in range(MOST_SEQUENCES + 1)]
    for seq in running:
        seq.state, seq.computed_tokens = SequenceState.RUNNING, 1
    assert MOST_SEQUENCES == 32
    assert speculation.drafts(running[:-1], 4096) and speculation.wants_tokens(32) and not speculation.wants_tokens(33)
    assert speculation.drafts(running, 4096) == {}
