"""Arrays arrive as they were sent, in one copy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.staging import ALIGN, Staging, places

SHAPES = st.one_of(st.tuples(st.integers(0, 40)), st.tuples(st.integers(0, 9), st.integers(1, 7)))


@given(st.lists(st.tuples(SHAPES, st.sampled_from(["<i8", "<i4", "<f4"])), max_size=9), st.integers(1, 3))
def test_arrays_arrive_whole_in_one_copy(kinds: list[tuple[tuple[int, ...], str]], times: int) -> None:
    staging = Staging(torch.device("cpu"))
    for turn in range(times):
        arrays = [(np.arange(int(np.prod(shape))) + 7 * turn).reshape(shape).astype(kind) for shape, kind in kinds]
        starts, size = places(arrays)
        assert all(start % ALIGN == 0 for start in starts)
        ends = [start + array.nbytes for start, array in zip(starts, arrays, strict=True)]
        assert all(end <= start for end, start in zip(ends, [*starts[1:], size], strict=False)), "none over another"
        buffer = torch.zeros(size + 5, dtype=torch.uint8)
        for sent in (staging.send(arrays, into=buffer), staging.send(arrays)):
            for array, tensor in zip(arrays, sent, strict=True):
                assert tensor.shape == array.shape and np.array_equal(tensor.numpy(), array)
    assert staging.num_copies == times, "and none where the host's memory is the device's"


def test_what_is_sent_next_leaves_the_last_alone() -> None:
    """Two buffers in turn: the copy of a step may still be under way while the next one is packed."""
    staging = Staging(torch.device("cpu"))
    first = staging._host(64)
    first[:] = 1
    staging._host(64)[:] = 2
    assert first.eq(1).all()
    assert staging._host(64).data_ptr() == first.data_ptr()


def test_ids_come_back_as_numbers() -> None:
    assert Staging(torch.device("cpu")).fetch(torch.tensor([3, -1, 5])).ids() == [3, -1, 5]
