"""Recorded steps: sizes, what fills them up, and replays that find each step's numbers in the same place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import StepArrays, StepInputs
from engine.kernels.gpu.graphs import DecodeGraphs, Size, bucket, padded, size_of
from engine.kernels.gpu.pieces import Pieces, plan_pieces
from engine.kernels.spans import SequenceSpan

CPU = torch.device("cpu")


class FakeTier:
    """Tensors by their names."""

    device = CPU

    def __init__(self) -> None:
        self.sizes: list[Size] = []

    def tile_of(self, plan: Pieces) -> int:
        return 16

    def placed(self, tensors: Sequence[torch.Tensor], size: Size) -> dict[str, torch.Tensor]:
        self.sizes.append(size)
        return dict(zip(("pieces", "slots", "slot_ends", "lengths", "tables"), tensors, strict=True))


class Replayed:
    """A graph that computes again, into the same tensor."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._work, self._result = work, torch.zeros_like(work())
        return self._result

    def replay(self) -> None:
        self.replays += 1
        self._result.copy_(self._work())


@given(st.integers(1, 5000))
def test_sizes_are_few_and_close(count: int) -> None:
    size = bucket(count)
    assert count <= size <= max(1.25 * count, 2 * count if count < 16 else 0)
    assert bucket(size) == size
    assert bucket(count) <= bucket(count + 1)


def test_there_are_26_sizes_up_to_512() -> None:
    sizes = sorted({bucket(count) for count in range(1, 513)})
    assert sizes[:9] == [1, 2, 4, 8, 16, 20, 24, 28, 32] and sizes[-1] == 512
    assert len(sizes) == 25


def decodes(lengths: list[int], first_block: int = 0) -> StepArrays:
    """A step of one token for each sequence, after `lengths` others."""
    spans, block = [], first_block
    for row, length in enumerate(lengths):
        own = length // 16 + 1
        spans.append(SequenceSpan(row, 1, length, tuple(range(block, block + own))))
        block += own
    rows = np.arange(len(lengths))
    plan = plan_pieces(spans, 16, most_rows=8, least_keys=64, wanted=12)
    return StepArrays(rows + 40, np.array(lengths), rows + 100, rows, plan, decodes=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=40))
def test_what_fills_a_step_up_does_nothing(lengths: list[int]) -> None:
    step = decodes(lengths)
    size = size_of(step.attention, 16)
    ids, positions, slots, pieces, parts, ends, seen, tables = padded(step, size)
    count, plan = len(lengths), step.attention
    assert [len(a) for a in (ids, positions, slots, ends, seen)] == [size.rows] * 5
    assert (len(pieces), len(parts)) == (size.pieces, size.slots)
    assert ids[:count].tolist() == step.token_ids.tolist() and slots[:count].tolist() == step.slots.tolist()
    assert (slots[count:] == -1).all(), "nothing is written for them"
    assert np.array_equal(pieces[: len(plan.pieces)], plan.pieces)
    assert not pieces[len(plan.pieces) :, 1].any() and (pieces[len(plan.pieces) :, 5] == -1).all()
    assert np.array_equal(parts[: len(plan.slots)], plan.slots) and np.array_equal(ends[:count], plan.slot_ends)
    assert (ends[count:] == plan.slot_ends[-1]).all(), "nothing is added up for them"
    assert np.array_equal(tables, plan.tables)


def test_the_third_step_of_a_size_is_a_replay_with_its_own_numbers() -> None:
    graphs, tier = [], FakeTier()

    def make() -> Replayed:
        graphs.append(Replayed())
        return graphs[-1]

    def forward(inputs: StepInputs) -> torch.Tensor:
        """What a step gives depends on all that it is given."""
        plan = inputs.attention
        return (inputs.token_ids * 3 + inputs.positions + plan["lengths"])[:, None].float()

    recorded = DecodeGraphs(forward, tier, 32, lambda: make)
    for turn, lengths in enumerate(([5, 9, 30], [6, 10, 31], [1, 2, 3], [4, 5, 6])):
        step = decodes(lengths)
        beside = [np.array([turn, 7], np.int32)]
        hidden, (extra,) = recorded.run(step, beside, None)
        wanted = step.token_ids * 3 + np.array(lengths) + step.attention.lengths
        assert hidden[:, 0].tolist() == wanted.tolist()
        assert extra.tolist() == [turn, 7]
    assert len(set(tier.sizes)) == 1 and len(graphs) == 1
    assert graphs[0].replays == 3, "the first step ran kernel by kernel, the second was recorded and replayed"


def test_tokens_of_the_last_step_are_found_on_the_device() -> None:
    recorded = DecodeGraphs(lambda inputs: inputs.token_ids[:, None].float(), FakeTier(), 32, lambda: Replayed)
    step = decodes([4, 4, 4])
    step.token_ids[:] = [-1 - 2, 11, -1]
    hidden, _ = recorded.run(step, [], torch.tensor([50, 51, -1]))
    assert hidden[:, 0].tolist() == [0, 11, 50], "one that failed gives a token whose result is thrown away"


def test_steps_beyond_the_most_rows_are_not_recorded() -> None:
    recorded = DecodeGraphs(lambda inputs: inputs.token_ids, FakeTier(), 2, lambda: Replayed)
    assert recorded.run(decodes([4, 4, 4]), [], None) is None


def test_a_larger_buffer_forgets_what_was_recorded_in_the_old_one() -> None:
    """Graphs that come after share other memory: that of graphs which are all gone takes no new ones."""
    pools: list[list[Replayed]] = []

    def maker() -> Callable[[], Replayed]:
        pools.append([])

        def make() -> Replayed:
            pools[-1].append(Replayed())
            return pools[-1][-1]

        return make

    recorded = DecodeGraphs(lambda inputs: (inputs.positions + 1)[:, None].float(), FakeTier(), 32, maker)
    for _ in range(3):
        recorded.run(decodes([4, 5]), [], None)
    large = np.zeros(1 << 19, np.int64)
    for _ in range(2):
        hidden, _ = recorded.run(decodes([7, 9]), [large], None)
        assert hidden[:, 0].tolist() == [8, 10]
    assert [len(graphs) for graphs in pools if graphs] == [1, 1]


def test_a_size_that_memory_does_not_suffice_to_record_runs_kernel_by_kernel() -> None:
    class Short(Replayed):
        def record(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
            tried.append(work)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    tried: list[object] = []
    recorded = DecodeGraphs(lambda inputs: (inputs.positions + 1)[:, None].float(), FakeTier(), 32, lambda: Short)
    for lengths in ([4, 5], [5, 6], [6, 7]):
        hidden, _ = recorded.run(decodes(lengths), [], None)
        assert hidden[:, 0].tolist() == [length + 1 for length in lengths]
    assert len(tried) == 1, "it isn't tried at each step"
