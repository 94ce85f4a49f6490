"""The predicted peak against a simulation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sched.budget import Load, StepBudget, least_outputs, predicted_peak_blocks

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


def test_what_a_request_is_certain_to_produce() -> None:
    assert least_outputs(SamplingParams(max_tokens=9), 9) == 1
    assert least_outputs(SamplingParams(max_tokens=9, min_tokens=4), 9) == 4
    assert least_outputs(SamplingParams(max_tokens=9, ignore_eos=True), 7) == 7
    assert least_outputs(SamplingParams(max_tokens=9, ignore_eos=True, stop=("x",)), 7) == 1
