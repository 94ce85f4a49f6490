"""Heads go on from the model's last row and change no answer, on an oracle whose rows show what they come of."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.cache.sequence import Sequence as RunningSequence
from engine.request import SamplingParams
from engine.sample.row import SampleRow
from engine.sched.plan import LastState
from engine.spec.heads import HeadsProposer
from engine.spec.speculation import Speculation
from tests.engine.oracle import VOCAB, OracleRunner, next_token, request
from tests.engine.sched.harness import Harness

NOTHING = -1


class OracleHeads:
    """Say what the model says, but for a share of texts, where they are wrong or have nothing to say."""

    num_heads = 3

    def __init__(self, *, are_sure: bool = False) -> None:
        self._are_sure = are_sure
        self.most_rows = self.calls = 0

    def begin(self, states: Sequence[NDArray[np.float32]]) -> list[list[int]]:
        return [[int(token) for token in values] for values in states]

    def next_ids(
        self, place: int, x: list[list[int]], token_ids: Sequence[int], rows: Sequence[SampleRow]
    ) -> list[int | None]:
        self.calls += 1
        self.most_rows = max(self.most_rows, len(rows))
        return [self._next(history, token, row) for history, token, row in zip(x, token_ids, rows, strict=False)]

    def _next(self, history: list[int], token: int, row: SampleRow) -> int | None:
        if history[-1] == NOTHING:
            return 7  # must not count
        history.append(token)
        assert len(history) == row.position, "the row is that of the token before"
        luck = 2 if self._are_sure else zlib.crc32(repr(history).encode()) % 7
        found = next_token(history, row.params)
        if luck == 0:
            history.append(NOTHING)
            return None
        return (found + 1) % VOCAB if luck == 1 else found


def make_harness(*, are_sure: bool = False, **options: Any) -> tuple[Harness, OracleHeads]:
    heads = OracleHeads(are_sure=are_sure)
    harness = Harness(speculation=Speculation(HeadsProposer(heads), is_gated=False), **options)
    harness.runner = OracleRunner(harness.runner.block_tokens, harness.runner.num_blocks, keeps_states=True)
    return harness, heads


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 30)), min_size=1, max_size=6),
    num_blocks=st.integers(12, 60),
    block_tokens=st.integers(4, 5),
    step_tokens=st.sampled_from([1, 2, 5, 64]),
    max_running=st.integers(1, 6),
    depth=st.integers(1, 3),
    preempts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=4),
)
def test_heads_change_no_answer(
    sizes: list[tuple[int, int]], preempts: list[tuple[int, int]], depth: int, **options: Any
) -> None:
    harness, _ = make_harness(**options)
    for index, (prompt, outputs) in enumerate(sizes):
        harness.add(request(f"r{index}", [1 + index % 3] * prompt, outputs, min_tokens=outputs // 2, seed=index))

    def preempt(step: int) -> None:
        for when, index in preempts:
            if when == step:
                harness.scheduler.preempt(f"r{index}")

    harness.run(depth=depth, on_step=preempt)
    harness.assert_answers()


def test_the_first_decode_has_a_draft_and_right_ones_save_steps() -> None:
    harness, heads = make_harness(are_sure=True)
    harness.add(request("r", [3] * 21, 40, ignore_eos=True))
    harness.run()
    harness.assert_answers()
    counters = harness.scheduler.counters
    assert harness.plans[1].chunks[0].num_draft == heads.num_heads, "a prompt's last row is enough"
    assert counters.accepted_tokens == 29 and counters.steps == 11
    assert heads.calls <= 3 * counters.steps


def test_longer_drafts_of_several_answers_share_calls() -> None:
    proposer = HeadsProposer(heads := OracleHeads())
    sequences = [RunningSequence(request(f"r{i}", [4, 5, 6 + i], 30, seed=i), i, 30) for i in range(3)]
    proposer.see({seq.id: LastState(3, np.array(seq.tokens[:2], np.float32)) for seq in sequences})
    assert [len(grades) for grades in proposer.look(sequences, [2, 9, 9])] == [2, 3, 3]
    found = proposer.propose(sequences, [1, 0, 3])
    assert heads.calls == 3 and heads.most_rows == 2
    for seq, proposed in zip(sequences, found, strict=True):
        alone = HeadsProposer(OracleHeads())
        alone.see({seq.id: LastState(3, np.array(seq.tokens[:2], np.float32))})
        assert alone.propose([seq], [len(proposed)]) == [proposed]
    assert found[1] == ()


def test_without_the_row_of_the_newest_token_nothing_is_proposed() -> None:
    """Of an answer that is resumed there is none; of one that went on without being seen, an old one."""
    proposer = HeadsProposer(OracleHeads())
    seq = RunningSequence(request("r", [4, 5], 30), 0, 30)
    assert proposer.look([seq], [5]) == [()] == proposer.propose([seq], [3])
    proposer.see({"r": LastState(3, np.zeros(2, np.float32))})
    assert proposer.look([seq], [5]) == [()] == proposer.propose([seq], [3])
    proposer.see({"r": LastState(2, np.array([4], np.float32))})
    assert proposer.look([seq], [5]) == [(0, 1, 2)]
    proposer.forget("r")
    assert proposer.look([seq], [5]) == [()]


def test_a_proposal_is_sampled_as_its_place_is() -> None:
    """With the same seed, choice, position and history; but without a form, which only the model's own row has."""
    asked: list[SampleRow] = []

    class Asked(OracleHeads):
        def next_ids(self, place: int, x: Any, token_ids: Sequence[int], rows: Sequence[SampleRow]) -> list[int | None]:
            asked.extend(rows)
            return [30 + place] * len(rows)

    params = SamplingParams(max_tokens=9, seed=3, frequency_penalty=0.5, grammar='{"regex":"a"}', logprobs=2)
    made = request("r", [4, 5], 9)
    seq = RunningSequence(type(made)(id="r", prompt_ids=(4, 5), params=params, choice=2), 0, 9)
    proposer = HeadsProposer(Asked())
    proposer.see({"r": LastState(2, np.array([4], np.float32))})
    assert proposer.propose([seq], [3]) == [(30, 31, 32)]
    assert [row.position for row in asked] == [2, 3, 4]
    assert [row.history for row in asked] == [(4, 5), (4, 5, 30), (4, 5, 30, 31)]
    assert {(row.choice, row.num_prompt_tokens, row.params.seed, row.params.grammar) for row in asked} == {
        (2, 2, 3, "")
    }


def test_what_heads_cost_is_measured() -> None:
    proposer = HeadsProposer(OracleHeads())
    assert proposer.cost([3]) == 0.0, "tried once"
    seq = RunningSequence(request("r", [4, 5], 30), 0, 30)
    proposer.see({"r": LastState(2, np.array([4], np.float32))})
    proposer.propose([seq], [3])
    assert 0 < proposer.cost([1]) < proposer.cost([3]) and proposer.cost([]) == 0.0
