"""The predicted peak against a simulation, and the forecast against streams of lengths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sched.budget import Forecast, Load, StepBudget, least_outputs, predicted_peak_blocks

loads = st.lists(st.builds(Load, st.integers(0, 40), st.integers(0, 40)), max_size=8)


@given(loads, st.integers(1, 9))
def test_the_predicted_peak_is_what_a_simulation_reaches(loads: list[Load], block_tokens: int) -> None:
    def used(step: int) -> int:
        alive = [load for load in loads if load.growth_tokens >= step]
        return sum(-(-(load.private_tokens + step) // block_tokens) for load in alive)

    expected = max((used(step) for step in range(41)), default=0)
    assert predicted_peak_blocks(loads, block_tokens) == expected


def test_a_round_never_spends_more_than_its_tokens() -> None:
    budget = StepBudget(5)
    budget.spend(3)
    assert (budget.tokens, budget.spent_tokens) == (2, 3)
    with pytest.raises(AssertionError, match="budget"):
        budget.spend(3)


def test_the_forecast_settles_where_nine_of_ten_answers_end_below() -> None:
    """Uniform lengths of 1 … 100 out of 1000: the 90th percentile is 0.09. The walk's steps are at most 0.045 and its
    spread around the rest point about as much; 0.01 … 0.25 leaves over four times that."""
    forecast, lengths = Forecast(), random.Random(1)
    for _ in range(3_000):
        forecast.observe_end(SamplingParams(max_tokens=1_000), lengths.randint(1, 100))
    assert 0.01 <= forecast.share <= 0.25


def test_an_answer_of_known_length_is_expected_in_full_and_teaches_nothing() -> None:
    forecast, params = Forecast(), SamplingParams(max_tokens=100, ignore_eos=True)
    forecast.observe_end(params, 100)
    assert forecast.share == 0.5
    assert forecast.output_tokens(params, 3, 100) == 100
    assert forecast.output_tokens(params, 3, 60) == 60


def test_an_answer_that_outgrew_the_forecast_is_expected_to_go_on() -> None:
    forecast, params = Forecast(), SamplingParams(max_tokens=100)
    assert forecast.output_tokens(params, 10, 100) == 50
    assert forecast.output_tokens(params, 50, 100) > 60
    assert forecast.output_tokens(params, 99, 100) == 100


def test_preemption_raises_the_reserve_and_ends_lower_it() -> None:
    forecast = Forecast()
    for _ in range(100):
        forecast.observe_preemption()
    assert forecast.reserve == 0.25
    forecast.observe_end(SamplingParams(max_tokens=4), 4)
    assert 0.2 < forecast.reserve < 0.25


def test_what_a_request_is_certain_to_produce() -> None:
    assert least_outputs(SamplingParams(max_tokens=9), 9) == 1
    assert least_outputs(SamplingParams(max_tokens=9, min_tokens=4), 9) == 4
    assert least_outputs(SamplingParams(max_tokens=9, ignore_eos=True), 7) == 7
    assert least_outputs(SamplingParams(max_tokens=9, ignore_eos=True, stop=("x",)), 7) == 1
