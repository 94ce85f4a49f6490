"""A draft model borrows blocks of the pool, reads what it must, and changes no answer.

Model and draft are oracles on one memory, as their layers are on one pool: a block that both use is seen at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.blocks import BlockPool
from engine.cache.loans import Loans
from engine.errors import MemoryShortageError
from engine.sched.plan import Chunk, StepPlan, StepResult
from engine.spec.draft_model import MOST_READ, DraftProposer
from engine.spec.speculation import Speculation
from tests.engine.oracle import VOCAB, OracleRunner, next_token, request
from tests.engine.sched.harness import Harness


class Draft(OracleRunner):
    """Says what the model says, but for a share of texts."""

    wrong = 0.2
    largest = 0
    tokens = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.largest = max(self.largest, plan.num_tokens)
        self.tokens += plan.num_tokens
        return super().execute(plan)


def guess(history: Sequence[int], chunk: Chunk) -> int:
    token = next_token(history, chunk.params)
    return (token + 1) % VOCAB if zlib.crc32(repr(list(history)).encode()) % 5 == 0 else token


def make_harness(**options: Any) -> tuple[Harness, Draft, DraftProposer]:
    sizes = {"block_tokens": 4, "num_blocks": 64, **options}
    draft = Draft(sizes["block_tokens"], sizes["num_blocks"], sample=guess)
    proposer = DraftProposer(draft, sizes["block_tokens"])
    harness = Harness(speculation=Speculation(proposer, is_gated=False), **sizes)
    draft.memory = harness.runner.memory
    return harness, draft, proposer


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 30)), min_size=1, max_size=6),
    spare_blocks=st.integers(0, 60),
    block_tokens=st.integers(1, 5),
    step_tokens=st.sampled_from([2, 5, 64]),
    max_running=st.integers(1, 6),
    preempts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=4),
)
def test_drafts_of_a_model_change_no_answer(
    sizes: list[tuple[int, int]], preempts: list[tuple[int, int]], spare_blocks: int, block_tokens: int, **options: Any
) -> None:
    num_blocks = 44 // block_tokens + 1 + spare_blocks  # any one fits
    harness, _, _ = make_harness(num_blocks=num_blocks, block_tokens=block_tokens, **options)
    for index, (prompt, outputs) in enumerate(sizes):
        harness.add(request(f"r{index}", [1 + index % 3] * prompt, outputs, min_tokens=outputs // 2, seed=index))

    def preempt(step: int) -> None:
        for when, index in preempts:
            if when == step:
                harness.scheduler.preempt(f"r{index}")

    harness.run(on_step=preempt)
    harness.assert_answers()


def test_it_computes_each_token_once_and_its_own_guesses() -> None:
    harness, draft, _ = make_harness()
    made = request("r", [3] * 21, 40, ignore_eos=True)
    harness.add(made)
    harness.run()
    harness.assert_answers()
    counters = harness.scheduler.counters
    assert counters.steps < 20 and counters.accepted_tokens > 20
    written = {block for block, _ in draft.memory}
    assert len(written) >= 28, "model and draft have blocks of their own"


def test_a_text_that_begins_as_the_last_one_is_read_from_there_on() -> None:
    """One after the other, as in one stream; what another project's text had in common isn't used."""
    read = {}
    for salt in ("mine", "other"):
        harness, draft, _ = make_harness(num_blocks=400, max_running=1)
        for name, end, of in (("first", 5, "mine"), ("second", 6, salt)):
            harness.add(request(name, [3] * 200 + [end] * 9, 30, ignore_eos=True, salt=of))
        harness.run()
        harness.assert_answers()
        assert harness.scheduler.num_used_blocks == 0, "nothing is kept when nobody is left"
        read[salt] = draft.tokens
    assert read["other"] - read["mine"] == 200


def test_a_long_text_is_read_in_pieces_and_a_short_answer_is_not_worth_it() -> None:
    harness, draft, _ = make_harness(num_blocks=800)
    harness.add(request("long", [3] * 600, 160, ignore_eos=True))
    harness.run()
    harness.assert_answers()
    assert MOST_READ < draft.largest <= MOST_READ + 1
    assert harness.scheduler.counters.accepted_tokens > 50
    harness, draft, _ = make_harness(num_blocks=800)
    harness.add(request("short", [3] * 600, 20, ignore_eos=True))
    harness.run()
    assert draft.largest == 0


def test_blocks_go_back_before_anybody_is_preempted() -> None:
    """While the pool is wide the draft has blocks; answers that fill it take them all, and none waits for it."""
    harness, _, _ = make_harness(num_blocks=32)
    for i in range(4):
        harness.add(request(f"r{i}", [i + 1] * 4, 27, ignore_eos=True, seed=i))
    lent = []
    harness.run(on_step=lambda step: lent.append(len(harness.scheduler._tables.loans.blocks)))
    harness.assert_answers()
    assert max(lent) > 0 and harness.scheduler.counters.preemptions == 0
    assert harness.scheduler.num_used_blocks == 0


def test_loans_leave_an_eighth_and_evict_nothing() -> None:
    pool = BlockPool(16)
    loans = Loans(pool)
    assert loans.take(15) is None
    blocks = loans.take(10)
    assert blocks is not None and loans.blocks == set(blocks)
    held = pool.allocate(4)
    assert loans.take(1) is None and not loans.is_due
    pool.allocate(1)
    assert loans.is_due
    loans.give_back(blocks)
    assert not loans.is_due and pool.num_available == 11
    pool.retain(held[0], 0)
    pool.release(held)
    assert loans.take(13) is None, "one of the free ones is cached"


def test_loans_take_untouched_blocks_before_anything_cached() -> None:
    pool = BlockPool(16)
    cached = pool.allocate(4)
    for depth, block in enumerate(cached):
        pool.retain(block, depth)
    pool.release(cached)
    blocks = Loans(pool).take(9)
    assert blocks is not None and not set(blocks) & set(cached)
    pool.check_integrity([blocks])
    pool.share(cached)  # still in the cache: KeyError otherwise


@pytest.mark.parametrize("right", [True, False])
def test_a_draft_that_cannot_sample_proposes_nothing_there(right: bool) -> None:
    harness, draft, _ = make_harness()
    if not right:
        draft.fail_at["r"] = 9
    harness.add(request("r", [3, 4], 20, ignore_eos=True))
    harness.run()
    harness.assert_answers()


def test_a_draft_that_finds_no_memory_costs_no_answer() -> None:
    class Narrow(Draft):
        def execute(self, plan: StepPlan) -> StepResult:
            if plan.step == 3:
                self.refused += 1
                raise MemoryShortageError("No room.")
            return super().execute(plan)

        refused = 0

    draft = Narrow(4, 64, sample=guess)
    harness = Harness(speculation=Speculation(DraftProposer(draft, 4), is_gated=False), block_tokens=4, num_blocks=64)
    draft.memory = harness.runner.memory
    harness.add(request("r", [3] * 21, 40, ignore_eos=True))
    harness.run()
    harness.assert_answers()
    assert draft.refused and harness.scheduler.num_used_blocks == 0


def test_a_draft_of_one_project_drafts_for_no_other() -> None:
    draft = Draft(4, 64, sample=guess)
    speculation = Speculation(DraftProposer(draft, 4), is_gated=False, salt="mine")
    harness = Harness(speculation=speculation, block_tokens=4, num_blocks=64)
    draft.memory = harness.runner.memory
    harness.add(request("theirs", [3] * 5, 20, ignore_eos=True, salt="theirs"))
    harness.run()
    assert harness.scheduler.counters.drafted_tokens == 0 and draft.largest == 0
    harness.add(request("mine", [4] * 5, 20, ignore_eos=True, salt="mine"))
    harness.run()
    harness.assert_answers()
    assert harness.scheduler.counters.accepted_tokens > 5
