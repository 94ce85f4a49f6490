"""The dial's rule on plain schedulers, and in the simulation: targets hold with it and not without, at little cost."""

from __future__ import annotations

import json

import pytest

from engine.request import Lane
from engine.sched import sim_lanes
from engine.sched.budget import StepBudget
from engine.sched.costs import GUESS, Work, work_of
from engine.sched.dial import QUIET_S, Dial
from engine.sched.plan import StepPlan
from engine.sched.sim_lanes import Scene, simulate
from tests.engine.oracle import request
from tests.engine.sched.harness import Harness


def seconds_of(plan: StepPlan) -> float:
    return GUESS.step_s + GUESS.of(work_of(plan))


def run_step(harness: Harness, dial: Dial | None = None) -> StepPlan:
    plan = harness.launch()
    assert plan is not None
    if dial is not None:
        dial.observe(work_of(plan), seconds_of(plan))
    harness.commit()
    return plan


def sizes(plan: StepPlan) -> dict[str, int]:
    return {chunk.seq_id: len(chunk.token_ids) for chunk in plan.chunks}


def busy_harness(dial: Dial | None) -> Harness:
    """Forty batch sequences decode, and there is more to begin."""
    harness = Harness(num_blocks=4000, block_tokens=16, step_tokens=512, max_running=64, dial=dial)
    harness.add(*(request(f"b{i}", [1 + i % 40] * 12, 200, ignore_eos=True) for i in range(40)))
    run_step(harness, dial)
    harness.add(*(request(f"more{i}", [41 + i % 5] * 400, 20, ignore_eos=True) for i in range(4)))
    return harness


def test_without_targets_or_interactive_requests_steps_are_full() -> None:
    whole = [sizes(run_step(busy_harness(None)))]
    for dial in (Dial(), Dial(ttft_s=0.03, itl_s=0.02)):
        harness = busy_harness(dial)
        whole.append(sizes(run_step(harness, dial)))
    assert whole[0] == whole[1] == whole[2]
    assert sum(whole[0].values()) == 512


def test_a_step_with_an_interactive_answer_under_way_takes_no_longer_than_itl() -> None:
    dial = Dial(itl_s=0.03)
    harness = busy_harness(dial)
    harness.add(request("urgent", [9] * 30, 50, lane=Lane.INTERACTIVE, ignore_eos=True))
    assert sizes(run_step(harness, dial))["urgent"] == 30, "its prompt goes first and has no gap yet"
    for _ in range(20):
        plan = run_step(harness, dial)
        assert next(iter(sizes(plan))) == "urgent"
        assert 0.015 < seconds_of(plan) <= 0.03


def test_as_long_as_interactive_requests_may_come_no_step_takes_longer_than_a_third_of_ttft() -> None:
    dial = Dial(ttft_s=0.15)
    harness = busy_harness(dial)
    harness.add(request("urgent", [9] * 5, 1, lane=Lane.INTERACTIVE))
    run_step(harness, dial)
    run_step(harness, dial)
    for _ in range(60):
        assert 0.02 < seconds_of(run_step(harness, dial)) <= 0.05
    for _ in range(3):
        dial.observe(Work(), QUIET_S / 2)
    harness.add(*(request(f"late{i}", [50] * 400, 20, ignore_eos=True) for i in range(4)))
    assert sum(sizes(run_step(harness, dial)).values()) == 512, "nobody came for a while"


def test_batch_work_gets_nothing_while_a_part_of_an_interactive_prompt_is_left_over() -> None:
    dial = Dial(itl_s=0.06)
    harness = busy_harness(dial)
    harness.add(request("first", [9] * 5, 50, lane=Lane.INTERACTIVE, ignore_eos=True))
    run_step(harness, dial)
    harness.add(request("long", [8] * 200, 50, lane=Lane.INTERACTIVE, ignore_eos=True))
    seen = 0
    while seen < 200:
        found = sizes(run_step(harness, dial))
        seen += found["long"]
        assert found["first"] == 1
        assert seconds_of(harness.plans[-1]) <= 0.061
        assert seen == 200 or found.keys() == {"first", "long"}
    assert found.keys() > {"first", "long"}, "what is left of the last step"


def test_targets_that_cant_be_reached_stop_nothing_for_good() -> None:
    dial = Dial(ttft_s=0.0001, itl_s=0.0001)
    harness = Harness(num_blocks=200, block_tokens=16, step_tokens=64, dial=dial)
    harness.add(*(request(f"b{i}", [1 + i] * 40, 5, ignore_eos=True) for i in range(6)))
    harness.add(*(request(f"u{i}", [11 + i] * 40, 5, lane=Lane.INTERACTIVE, ignore_eos=True) for i in range(3)))
    while harness.scheduler.has_work():
        run_step(harness, dial)
    harness.assert_answers()
    order = list(harness.finished)
    assert {name[0] for name in order[:3]} == {"u"}


@pytest.mark.parametrize("itl_s", [0.0015, 0.012])
def test_prompts_and_batch_work_go_on_beside_an_answer_that_takes_all_the_time(itl_s: float) -> None:
    """A quarter of the limit is less than the cost of one prompt token, or there is no time beside one decode."""
    dial = Dial(itl_s=itl_s)
    harness = Harness(num_blocks=400, block_tokens=16, step_tokens=64, dial=dial)
    harness.add(request("endless", [9] * 5, 4000, lane=Lane.INTERACTIVE, ignore_eos=True))
    run_step(harness, dial)
    harness.add(request("call", [8] * 40, 3, lane=Lane.INTERACTIVE, ignore_eos=True))
    harness.add(request("batch", [7] * 10, 3, ignore_eos=True))
    taken = [sizes(run_step(harness, dial)) for _ in range(16)]
    assert all(found["endless"] == 1 for found in taken)
    assert "call" in harness.finished and all(found["call"] == 4 for found in taken[:10])
    for _ in range(100):
        plan = run_step(harness, dial)
        assert seconds_of(plan) < 0.016, "a few tokens, no more"
    assert "batch" in harness.finished
    harness.assert_answers(["call", "batch"])


def test_batch_work_alone_is_never_due() -> None:
    """As long as calls may come, steps without any are what the limit allows."""
    dial = Dial(ttft_s=0.15)
    harness = busy_harness(dial)
    harness.add(request("urgent", [9] * 5, 1, lane=Lane.INTERACTIVE))
    for _ in range(40):
        run_step(harness, dial)
        assert not dial._last.is_due


def test_more_is_reckoned_with_where_steps_vary_more() -> None:
    dial, work = Dial(itl_s=0.1), Work(rows=10, context_tokens=1000)
    usual = GUESS.step_s + GUESS.of(work)
    seen = []
    for factors in ([1.0] * 2000, [1.0, 1.0, 1.0, 1.5] * 200):
        for factor in factors:
            dial.observe(work, usual * factor)
        budget = dial.budget(512, is_interactive=True, is_answering=True)
        seen.append(budget.seconds + budget.costs.step_s)
    assert seen[0] == pytest.approx(0.092, rel=0.1), (
        "nearly all of a step's share of the target where each step is as predicted"
    )
    assert 0.05 <= seen[1] <= 0.8 * seen[0]


def test_overlapping_steps_leave_time_for_one_more() -> None:
    limits = []
    for ahead in (0, 1):
        budget = Dial(ttft_s=0.6, steps_ahead=ahead).budget(512, is_interactive=True, is_answering=False)
        limits.append(budget.seconds + GUESS.step_s)
    assert limits[1] == pytest.approx(limits[0] * 3 / 4)


def test_a_budget_without_seconds_counts_tokens_only() -> None:
    budget = StepBudget(10)
    assert budget.chunk_tokens(0, 50, is_interactive=False) == 10
    budget.spend(10)
    assert not budget.takes_decode(5, is_interactive=True)


def test_simulated_targets_hold_with_the_dial_and_not_without_and_cost_the_batch_little() -> None:
    """Interactive arrivals at 30 % of capacity over an endless batch."""
    found = simulate(Scene(max_running=32), num_requests=24)
    with_dial, without = found["dial"], found["no_dial"]
    assert with_dial["ttft_p99_s"] <= found["ttft_target_s"]
    assert with_dial["itl_p99_s"] <= found["itl_target_s"]
    assert without["ttft_p99_s"] > found["ttft_target_s"]
    assert without["itl_p99_s"] > found["itl_target_s"]
    assert with_dial["batch_ratio"] >= 0.85
    assert with_dial["busy_share"] >= 0.95


def test_the_simulation_prints_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    sim_lanes.main(["--requests", "3", "--load", "0.9"])
    assert {"dial", "no_dial", "batch_alone_tps"} <= json.loads(capsys.readouterr().out).keys()
