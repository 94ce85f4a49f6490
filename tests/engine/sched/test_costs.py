"""What is learned of a step's cost from steps: the line they lie on, whatever noise and whatever is never seen."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sched.costs import GUESS, Costs, MeasuredCosts, Work, decode_work, prompt_work, work_of
from tests.engine.oracle import request
from tests.engine.sched.harness import Harness

factors = st.floats(0.1, 10)


def some_work(rng: random.Random) -> Work:
    prompts = prompt_work(rng.randrange(2000), rng.randrange(1, 500)) if rng.random() < 0.5 else Work()
    rows, context = rng.randrange(0, 64), rng.randrange(50, 500)
    return Work(*prompts[:2], rows, rows * context)


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[factors] * 5), st.integers(0, 1000))
def test_steps_without_noise_are_learned_whatever_the_machine(machine: tuple[float, ...], seed: int) -> None:
    true = Costs(*(factor * cost for factor, cost in zip(machine, GUESS, strict=True)))
    rng, measured = random.Random(seed), MeasuredCosts()
    for _ in range(200):
        work = some_work(rng)
        measured.observe(work, true.step_s + true.of(work))
    found = measured.costs
    for _ in range(20):
        work = some_work(rng)
        assert found.step_s + found.of(work) == pytest.approx(true.step_s + true.of(work), rel=0.25)


def test_noise_and_hiccups_move_the_line_little() -> None:
    rng, measured = random.Random(1), MeasuredCosts()
    for _ in range(600):
        work = some_work(rng)
        seconds = (GUESS.step_s + GUESS.of(work)) * rng.lognormvariate(0.0, 0.1)
        measured.observe(work, seconds * (10.0 if rng.random() < 0.02 else 1.0))
    for _ in range(20):
        work = some_work(rng)
        true, found = GUESS.step_s + GUESS.of(work), measured.costs.step_s + measured.costs.of(work)
        assert found == pytest.approx(true, rel=0.15)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2000), st.integers(0, 64), factors), max_size=20))
def test_no_cost_is_negative_whatever_steps_say(steps: list[tuple[int, int, int, float]]) -> None:
    measured = MeasuredCosts()
    for size, start, rows, seconds in steps:
        work = Work(*prompt_work(start, size)[:2], rows, rows * start)
        measured.observe(work, seconds)
        assert min(measured.costs) >= 0.0


def test_a_first_step_scales_the_guess() -> None:
    measured, work = MeasuredCosts(), Work(rows=10, context_tokens=1000)
    measured.observe(work, (GUESS.step_s + GUESS.of(work)) / 100)
    assert measured.costs.token_s == pytest.approx(GUESS.token_s / 100), "nothing was seen of prompts"


def test_what_the_machine_has_become_counts_not_what_it_was() -> None:
    measured, work = MeasuredCosts(), Work(rows=10, context_tokens=1000)
    for seconds in [0.02] * 500 + [0.1] * 1500:
        measured.observe(work, seconds)
    assert measured.costs.step_s + measured.costs.of(work) == pytest.approx(0.1, rel=0.05)


@given(st.tuples(*[factors] * 5), st.integers(0, 5000), st.floats(0, 10))
def test_as_many_prompt_tokens_are_promised_as_the_time_suffices_for(
    machine: tuple[float, ...], start: int, seconds: float
) -> None:
    costs = Costs(*(factor * cost for factor, cost in zip(machine, GUESS, strict=True)))
    most = costs.prompt_tokens(start, seconds)
    assert costs.of(prompt_work(start, most)) <= seconds * (1 + 1e-9)
    assert costs.of(prompt_work(start, most + 1)) >= seconds * (1 - 1e-9)


def test_the_work_of_a_plan_is_that_of_its_chunks() -> None:
    harness = Harness(step_tokens=64)
    harness.add(request("old", [1] * 10, 5, ignore_eos=True))
    harness.launch()
    harness.commit()
    harness.add(request("new", [2] * 7, 5))
    plan = harness.launch()
    assert plan is not None
    prompt, decode = prompt_work(0, 7), decode_work(10)
    assert work_of(plan) == Work(*(mine + theirs for mine, theirs in zip(prompt, decode, strict=True)))
    assert (prompt, decode) == (Work(7, 24.5, 0, 0), Work(0, 0, 1, 11))
