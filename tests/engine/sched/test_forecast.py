"""Forecasts against streams of lengths: what is drawn for many is spread as what comes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Request
from engine.sched.forecast import Forecast
from tests.engine.oracle import request

DRAWS = [(i + 0.5) / 64 for i in range(64)]


def told(forecast: Forecast, made: Request, num_outputs: int, *, ends: bool = True) -> None:
    """An answer that got this far, token by token."""
    for so_far in range(1, num_outputs + 1):
        forecast.observe_token(made, so_far)
    if ends:
        forecast.observe_end(made, num_outputs)


def drawn(forecast: Forecast, made: Request, num_outputs: int = 0) -> list[int]:
    most = made.params.max_tokens
    return sorted(forecast.output_tokens(made, num_outputs, most, draw) for draw in DRAWS)


@pytest.mark.parametrize("num_outputs", [0, 20, 60])
def test_draws_are_spread_like_the_lengths_of_siblings_that_got_as_far(num_outputs: int) -> None:
    """Uniform lengths of 1 … 100. Buckets are an eighth of an octave wide and 1,000 answers are known, of which the
    last 256 weigh most: a quantile is off by less than 15."""
    forecast, lengths, made = Forecast(), random.Random(1), request("r", [1], 1_000)
    for _ in range(1_000):
        told(forecast, made, lengths.randint(1, 100))
    found = drawn(forecast, made, num_outputs)
    for share in (0.25, 0.5, 0.75):
        expected = num_outputs + share * (100 - num_outputs)
        assert abs(found[int(share * len(found))] - expected) < 15


def test_answers_that_still_run_count_as_long_ones() -> None:
    """Half of the answers have 10 tokens, half have 200; while only short ones have ended, long ones are foreseen."""
    forecast, made = Forecast(), request("r", [1], 400)
    for _ in range(60):
        told(forecast, made, 10)
        told(forecast, made, 50, ends=False)
    found = drawn(forecast, made)
    assert 0.35 < sum(guess > 50 for guess in found) / len(found) < 0.65
    assert min(drawn(forecast, made, 50)) > 50


def test_projects_and_limits_are_learned_apart() -> None:
    forecast, made = Forecast(), request("r", [1], 400)
    for _ in range(300):
        told(forecast, made, 4)
    assert drawn(forecast, made)[32] <= 5
    for other in (request("r", [1], 400, salt="other"), request("r", [1], 399)):
        assert drawn(forecast, other) == drawn(Forecast(), other)
    assert 60 < sum(drawn(Forecast(), made)) / len(DRAWS) < 140, "a quarter of max_tokens, before anything is known"


@given(
    st.lists(st.integers(1, 300), max_size=40),
    st.integers(0, 300),
    st.integers(1, 400),
    st.integers(0, 400),
    st.floats(0, 1, exclude_max=True),
)
def test_a_guess_is_above_what_is_there_and_within_the_limits(
    lengths: list[int], num_outputs: int, max_tokens: int, min_tokens: int, draw: float
) -> None:
    forecast = Forecast()
    made = request("r", [1], max_tokens, min_tokens=min(min_tokens, max_tokens))
    for length in lengths:
        told(forecast, made, min(length, max_tokens))
    so_far = min(num_outputs, max_tokens - 1)
    guess = forecast.output_tokens(made, so_far, max_tokens, draw)
    assert so_far < guess <= max_tokens
    assert guess >= made.params.min_tokens
    assert guess <= forecast.output_tokens(made, so_far, max_tokens, min(draw + 0.1, 0.999))


@pytest.mark.parametrize("known", [{"max_tokens": 100, "ignore_eos": True}, {"max_tokens": 1}])
def test_an_answer_of_known_length_is_expected_in_full_and_teaches_nothing(known: dict) -> None:
    forecast, made = Forecast(), request("r", [1], **known)
    told(forecast, made, made.params.max_tokens)
    assert forecast.output_tokens(made, 0, made.params.max_tokens, 0.1) == made.params.max_tokens
    other = request("r", [1], made.params.max_tokens + 1)
    assert drawn(forecast, other) == drawn(Forecast(), other)
    assert not forecast._siblings.keys() - {("", made.params.max_tokens + 1)}


def test_memory_is_bounded_when_every_request_has_limits_of_its_own() -> None:
    forecast = Forecast()
    for limit in range(2, 700):
        told(forecast, request("r", [1], limit), 1)
    assert len(forecast._siblings) == 256


def test_preemption_raises_the_reserve_and_ends_lower_it() -> None:
    forecast = Forecast()
    for _ in range(100):
        forecast.observe_preemption()
    assert forecast.reserve == 0.25
    forecast.observe_end(request("r", [1], 4), 4)
    assert 0.2 < forecast.reserve < 0.25
