"""Windows in the scheduler, on a memory that shows wrong reads: drafts change no answer and leave nothing behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.sequence import Sequence as RunningSequence
from engine.request import FinishReason, Lane
from engine.sched.dial import Dial
from engine.sched.plan import StepResult
from engine.spec.proposer import Grades
from engine.spec.speculation import Speculation
from engine.spec.verify import verified
from tests.engine.oracle import EOS, answer, request
from tests.engine.sched.harness import Harness
from tests.engine.spec.guesser import Guesser


def make_harness(right: float, **options: object) -> tuple[Harness, Guesser]:
    guesser = Guesser(right)
    return Harness(speculation=Speculation(guesser, is_gated=False), **options), guesser


def add(harness: Harness, guesser: Guesser, *requests: object) -> None:
    for made in requests:
        guesser.know(made)
        harness.add(made)


def test_a_window_yields_what_was_sampled_up_to_the_first_wrong_draft() -> None:
    assert verified((), (7,)) == (7,)
    assert verified((7, 8), (7, 8, 9)) == (7, 8, 9)
    assert verified((7, 5), (7, 8, 9)) == (7, 8)
    assert verified((5, 8), (7, 8, 9)) == (7,)
    assert verified((7, 8), (7, None, 9)) == (7,), "what can't be sampled fails in the next step, where it is first"
    assert verified((7,), (None, 9)) == () == verified((), ())


@settings(max_examples=60, deadline=None)
@given(
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=6),
    num_blocks=st.integers(12, 40),
    block_tokens=st.integers(1, 5),
    step_tokens=st.sampled_from([1, 2, 5, 9, 64]),
    max_running=st.integers(1, 6),
    depth=st.integers(1, 3),
    prefix_cache=st.booleans(),
    ends=st.booleans(),
)
def test_drafts_change_no_answer(
    right: float, sizes: list[tuple[int, int]], depth: int, ends: bool, **options: object
) -> None:
    harness, guesser = make_harness(right, **options)
    for index, (prompt, outputs) in enumerate(sizes):
        made = request(
            f"r{index}", [1 + index % 3] * prompt, outputs, ignore_eos=not ends, min_tokens=outputs // 2, seed=index
        )
        add(harness, guesser, made)
    harness.run(depth=depth)
    for name, made in harness.requests.items():
        seq = harness.finished[name]
        if seq.error_code != "kv_capacity_exceeded":
            assert (seq.output_ids, seq.finish_reason) == answer(made)


def test_no_drafts_are_made_for_batch_work_in_steps_that_are_bounded() -> None:
    looked: list[str] = []

    class Watched(Guesser):
        def look(self, sequences: Sequence[RunningSequence], most_tokens: Sequence[int]) -> list[Grades]:
            looked.extend(seq.id for seq in sequences)
            return super().look(sequences, most_tokens)

    guesser = Watched(1.0)
    harness = Harness(speculation=Speculation(guesser, is_gated=False), dial=Dial(itl_s=0.5))
    batch = request("batch", [3, 4, 5], 60, ignore_eos=True)
    call = request("call", [6, 7], 30, lane=Lane.INTERACTIVE, ignore_eos=True)
    add(harness, guesser, batch, call)
    while "call" not in harness.finished:
        assert harness.launch() is not None
        harness.commit()
    assert set(looked) == {"call"}
    assert harness.scheduler.counters.accepted_tokens > 0
    harness.run()
    assert "batch" in looked, "nothing bounds the steps when no call is there"
    harness.assert_answers()


def test_right_drafts_save_steps_and_are_counted() -> None:
    made = request("r", [3, 4, 5], 40, ignore_eos=True)
    plain = Harness()
    sure, guesser = make_harness(1.0)
    plain.add(made)
    plain.run()
    add(sure, guesser, made)
    sure.run()
    sure.assert_answers()
    counters = sure.scheduler.counters
    assert plain.scheduler.counters.steps == 40 > 2 * counters.steps
    assert counters.accepted_tokens == counters.drafted_tokens == 40 - counters.steps
    assert 0 < counters.verifications < counters.steps
    assert counters.output_tokens == 40 and counters.computed_tokens == 3 + 39
    assert sure.finished["r"].num_steps == counters.steps


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("right", [0.6, 1.0])
def test_preempted_at_every_step(right: float, depth: int) -> None:
    """Also while a window is in flight, whose tokens count though its blocks are gone."""
    preempted = 0
    for when in range(14):
        harness, guesser = make_harness(right)
        made = [request(f"r{i}", [2] * (3 + i), 60, ignore_eos=True, seed=i) for i in range(3)]
        add(harness, guesser, *made)
        for step in range(14):
            if step == when:
                preempted += sum(harness.scheduler.preempt(f"r{i}") for i in range(2))
            harness.launch()
            while len(harness.in_flight) >= depth:
                harness.commit()
        harness.run(depth=depth)
        harness.assert_answers()
    assert preempted > 8, "the victims must have been running"


def test_an_end_inside_a_window_ends_the_answer_there() -> None:
    """By EOS and by max_tokens; EOS before min_tokens doesn't."""
    found = set()
    for seed in range(40):
        made = request("r", [4, 5], 30, seed=seed, min_tokens=4)
        harness, guesser = make_harness(1.0)
        add(harness, guesser, made)
        harness.run()
        harness.assert_answers()
        seq = harness.finished["r"]
        found.add((seq.finish_reason, EOS in seq.output_ids[:4]))
    assert found >= {(FinishReason.STOP, False), (FinishReason.STOP, True), (FinishReason.LENGTH, False)}


def test_a_row_that_fails_inside_a_window_costs_what_it_costs_without() -> None:
    made = request("r", [4, 5], 30, ignore_eos=True)
    tokens, _ = answer(made)
    for position in range(3, 20):
        harness, guesser = make_harness(1.0)
        harness.runner.fail_at["r"] = position
        add(harness, guesser, made)
        harness.run()
        seq = harness.finished["r"]
        assert (seq.finish_reason, seq.output_ids) == (FinishReason.ERROR, tokens[: position - 2])


def test_what_fails_behind_the_end_of_an_answer_is_not_its_end() -> None:
    """A result may say why nothing follows the tokens that it has: they are read first, and may end the answer."""
    for ends, (reason, kept) in {True: (FinishReason.STOP, 2), False: (FinishReason.ERROR, 3)}.items():
        scheduler = Harness().scheduler
        scheduler._judge = lambda seq, token_id, ends=ends: FinishReason.STOP if ends and token_id == 8 else None
        seq = scheduler.add(request("r", [4, 5], 30))
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, StepResult({"r": (7,)}, {}))
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, StepResult({"r": (8, 9)}, {"r": "It can't go on."}, {"r": "dead_end"}))
        assert (seq.finish_reason, seq.output_ids) == (reason, [7, 8, 9][:kept])
        assert seq.error_code == (None if ends else "dead_end")
        scheduler.check_integrity()
        assert not scheduler.num_used_blocks


def test_the_prefix_index_has_what_was_accepted_and_nothing_that_was_rejected() -> None:
    """The next turn hits all full blocks of the answer; a prompt made of rejected drafts hits nothing."""
    harness, guesser = make_harness(0.5, block_tokens=2)
    add(harness, guesser, request("first", [4, 5], 30, ignore_eos=True))
    harness.run()
    whole = [4, 5, *harness.finished["first"].output_ids]
    tried = [[*whole[: chunk.start + 1], *chunk.draft] for plan in harness.plans for chunk in plan.chunks]
    wrong = [tokens for tokens in tried if tokens != whole[: len(tokens)]]
    assert wrong
    for index, tokens in enumerate(wrong):
        right = next(i for i, token in enumerate(tokens) if token != whole[i])
        add(harness, guesser, request(f"w{index}", [*tokens, 1], 1))
        harness.run()
        assert (harness.finished[f"w{index}"].hit_tokens or 0) <= right
    add(harness, guesser, request("turn", [*whole, 1], 1))
    harness.run()
    assert harness.finished["turn"].hit_tokens == (len(whole) - 1) // 2 * 2


def test_windows_take_no_block_that_another_needs() -> None:
    """In a pool that just holds the answers, drafts preempt nobody."""
    made = [request(f"r{i}", [i + 1] * 4, 12, ignore_eos=True, seed=i) for i in range(3)]
    harness, guesser = make_harness(0.3, num_blocks=12, block_tokens=4)
    add(harness, guesser, *made)
    harness.run()
    harness.assert_answers()
    assert harness.scheduler.counters.preemptions == 0 < harness.scheduler.counters.verifications


def test_several_answers_to_one_prompt_each_have_their_windows() -> None:
    harness, guesser = make_harness(0.8)
    parent = request("p", [7] * 9, 20, ignore_eos=True)
    add(harness, guesser, parent)
    for seed in (4, 5):
        child = request(f"c{seed}", [7] * 9, 20, ignore_eos=True, seed=seed)
        guesser.know(child)
        harness.requests[child.id] = child
        harness.scheduler.fork("p", child)
    harness.run()
    harness.assert_answers()
    assert harness.scheduler.counters.accepted_tokens > 0
