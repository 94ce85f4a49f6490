"""Each layout gives back what was written, with the bits and offsets that other tools expect."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.quant.groups import GroupedWeight, Scheme, round_to_nearest
from engine.quant.layouts import LAYOUTS, PartError, Stored, dense
from engine.quant.pack import pack_words
from tests.engine.quant.problems import make_problem


def stored(layout: str, tensors: dict[str, Tensor], bits: int, zero_offset: int | None = None) -> Stored:
    offset = int(layout == "gptq") if zero_offset is None else zero_offset
    return LAYOUTS[layout].read(lambda part, dtype: tensors[part], tensors.__contains__, bits, offset)


def a_weight(bits: int = 4, symmetric: bool = True, rows: int = 16, group: int = 32) -> GroupedWeight:
    scheme = Scheme(bits=bits, group=group, symmetric=symmetric)
    return round_to_nearest(make_problem(bits, rows, 2, scheme).weight, scheme)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(tuple(LAYOUTS)),
    st.sampled_from((4, 8)),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from((32, 64, 128)),
)
def test_a_weight_comes_back(layout: str, bits: int, symmetric: bool, rows: int, group: int) -> None:
    bits = 4 if layout == "awq" else bits
    symmetric = symmetric or layout == "gptq"
    weight = a_weight(bits, symmetric, rows * 8, group)
    tensors = LAYOUTS[layout].write(weight, torch.float16)
    assert set(LAYOUTS[layout].needed) <= set(tensors) <= set(LAYOUTS[layout].parts)
    found, order = stored(layout, tensors, bits)
    assert order is None
    assert torch.equal(found.codes, weight.codes)
    assert torch.equal(found.dequantized(), weight.dequantized())
    assert (found.zero is None) == symmetric


def test_gptq_files_hold_zeros_less_one_and_columns_in_words() -> None:
    tensors = LAYOUTS["gptq"].write(a_weight(), torch.float16)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "qweight": (8, 16),
        "qzeros": (2, 2),
        "scales": (2, 16),
        "g_idx": (64,),
    }
    assert (tensors["qzeros"] == 0x77777777).all()
    assert tensors["scales"].dtype == torch.float16
    newer, _ = stored("gptq", {**tensors, "qzeros": tensors["qzeros"] + 0x11111111 - (1 << 32)}, 4, zero_offset=0)
    assert newer.zero is None


def test_zeros_of_0_in_older_gptq_files_borrow_from_their_neighbours() -> None:
    """As gptqmodel writes them: it takes one from each zero of a word by a single subtraction."""
    zero = torch.tensor([[0, 3], [0, 0], [15, 1], [8, 0]]).repeat(4, 1).to(torch.uint8)
    tensors = LAYOUTS["gptq"].write(a_weight(), torch.float16)
    older = {**tensors, "qzeros": pack_words(zero.t(), 4) - 0x11111111}
    read, _ = stored("gptq", older, 4)
    assert read.zero is not None
    assert torch.equal(read.zero, zero)


def test_awq_files_have_outputs_in_words() -> None:
    tensors = LAYOUTS["awq"].write(a_weight(), torch.float16)
    assert tensors["qweight"].shape == (64, 2)
    assert (tensors["qzeros"] == -2004318072).all()  # 0x88888888
    assert tensors["scales"].shape == (2, 16)


def test_compressed_tensors_have_their_shape_beside_them() -> None:
    tensors = LAYOUTS["compressed-tensors"].write(a_weight(symmetric=False), torch.bfloat16)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "weight_packed": (16, 8),
        "weight_scale": (16, 2),
        "weight_zero_point": (2, 2),
        "weight_shape": (2,),
    }
    assert tensors["weight_shape"].tolist() == [16, 64]


def test_one_scale_for_the_matrix_is_that_of_each_row() -> None:
    """Strategy `tensor` of compressed-tensors."""
    tensors = LAYOUTS["compressed-tensors"].write(a_weight(), torch.bfloat16)
    found, _ = stored("compressed-tensors", {**tensors, "weight_scale": torch.tensor([0.5])}, 4)
    assert torch.equal(found.dequantized(), (a_weight().codes.float() - 8) * 0.5)


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
def test_columns_in_another_order_are_read_by_their_groups(layout: str) -> None:
    weight = a_weight()
    tensors = LAYOUTS[layout].write(weight, torch.float16)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)) // 32
    name = "g_idx" if layout == "gptq" else "weight_g_idx"
    found = stored(layout, {**tensors, name: order.to(torch.int32)}, 4)
    assert found.order is not None
    expected = (weight.codes.float() - 8) * weight.scale[:, order]
    assert torch.equal(dense(found), expected)


BREAKS = [
    ("gptq", {"scales": torch.ones(3, 16)}, "qzeros", "expected"),
    ("gptq", {"scales": torch.zeros(2, 16)}, "scales", "zero or not a number"),
    ("gptq", {"scales": torch.full((2, 16), float("nan"))}, "scales", "zero or not a number"),
    ("gptq", {"g_idx": torch.full((64,), 2, dtype=torch.int32)}, "g_idx", "one of 2 groups"),
    ("gptq", {"scales": torch.ones(5, 16), "qzeros": torch.zeros(5, 2, dtype=torch.int32)}, "scales", "5 groups"),
    ("awq", {"scales": torch.ones(2, 15)}, "scales", "expected"),
    ("awq", {"scales": torch.ones(0, 16), "qzeros": torch.ones(0, 2, dtype=torch.int32)}, "scales", "no matrix"),
    ("gptq", {"qweight": torch.zeros(8, dtype=torch.int32)}, "qweight", "no matrix"),
    ("compressed-tensors", {"weight_packed": torch.zeros(16, 8, 2, dtype=torch.int32)}, "weight_packed", "no matrix"),
    ("compressed-tensors", {"weight_shape": torch.tensor([16, 72])}, "weight_shape", "weight_packed"),
    ("compressed-tensors", {"weight_shape": torch.tensor([16])}, "weight_shape", "weight_packed"),
    ("compressed-tensors", {"weight_scale": torch.ones(15, 2)}, "weight_scale", "expected"),
]


@pytest.mark.parametrize(("layout", "changes", "part", "says"), BREAKS, ids=lambda value: str(value)[:20])
def test_what_does_not_fit_is_told(layout: str, changes: dict[str, Tensor], part: str, says: str) -> None:
    tensors = LAYOUTS[layout].write(a_weight(), torch.float16) | changes
    with pytest.raises(PartError, match=says) as caught:
        stored(layout, tensors, 4)
    assert caught.value.part == part
