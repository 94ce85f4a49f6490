"""Codes stay near the numbers they stand for, and bits keep their places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.quant.groups import Scheme, round_to_nearest
from engine.quant.pack import AWQ_ORDER, IN_ORDER, pack_bytes, pack_words, unpack_bytes, unpack_words
from tests.engine.quant.problems import Problem, problems


@settings(max_examples=40, deadline=None)
@given(problems, st.sampled_from((1e-4, 1.0, 300.0)))
def test_no_number_is_off_by_more_than_half_a_scale_or_lies_far_outside(problem: Problem, size: float) -> None:
    weight, scheme = problem.weight * size, problem.scheme
    found = round_to_nearest(weight, scheme)
    zero = torch.full_like(found.scale, (scheme.top + 1) / 2) if found.zero is None else found.zero.float()
    steps = weight.view(*found.scale.shape, -1) / found.scale[..., None] + zero[..., None]
    outside = (steps - scheme.top - 0.5).clamp(min=0) + (-0.5 - steps).clamp(min=0)
    off = (found.dequantized() - weight).view(steps.shape) / found.scale[..., None]
    assert (off.abs() <= 0.5001 + outside).all()
    exact = round_to_nearest(weight, replace(scheme, scale_dtype=torch.float32)).scale
    rounded = (exact / found.scale - 1).abs().amax()
    assert outside.amax() <= 0.5001 + float(rounded) * (scheme.top + 1), "no more than the other end, and by the scale"
    assert found.codes.max() <= scheme.top
    assert torch.equal(found.scale.to(scheme.scale_dtype).float(), found.scale), "scales are stored as they are used"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_weight_of_a_group_is_its_lowest_code(dtype: torch.dtype) -> None:
    weight = torch.randn(400, 64, generator=torch.Generator().manual_seed(3))
    found = round_to_nearest(weight, Scheme(bits=4, group=64, scale_dtype=dtype))
    at = weight.abs().argmax(1, keepdim=True)
    assert (found.codes.gather(1, at) == 0).all()
    assert (found.scale[:, 0].sign() == -weight.gather(1, at)[:, 0].sign()).all()
    assert torch.allclose(found.dequantized().gather(1, at), weight.gather(1, at), rtol=2**-8)


@settings(max_examples=20, deadline=None)
@given(problems)
def test_eight_bits_are_nearer_than_four(problem: Problem) -> None:
    def error(bits: int) -> float:
        scheme = Scheme(bits=bits, group=problem.scheme.group, symmetric=problem.scheme.symmetric)
        return float((round_to_nearest(problem.weight, scheme).dequantized() - problem.weight).square().sum())

    assert error(8) < error(4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_and_constant_groups_are_exact(symmetric: bool) -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 0.75
    found = round_to_nearest(weight, Scheme(bits=8, group=32, symmetric=symmetric)).dequantized()
    assert torch.equal(found[0], weight[0])
    assert torch.allclose(found[1], weight[1], rtol=0.01)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from((4, 8)), st.integers(1, 5), st.integers(1, 40))
def test_words_hold_what_was_packed(data: st.DataObject, bits: int, rows: int, columns: int) -> None:
    order = data.draw(st.sampled_from((IN_ORDER, AWQ_ORDER))) if bits == 4 else IN_ORDER
    columns = columns if order == IN_ORDER else columns * 8
    codes = torch.tensor(
        data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=rows * columns, max_size=rows * columns)),
        dtype=torch.uint8,
    ).view(rows, columns)
    words = pack_words(codes, bits, order)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack_words(words, bits, columns, order), codes)
    if columns % 2 == 0:
        assert torch.equal(unpack_bytes(pack_bytes(codes, bits), bits), codes)


def test_words_have_the_bits_of_the_public_formats() -> None:
    eight = torch.arange(8, dtype=torch.uint8)[None]
    assert pack_words(eight, 4).tolist() == [[0x76543210]]
    assert pack_words(eight, 4, AWQ_ORDER).tolist() == [[0x75316420]]
    assert pack_words(torch.tensor([[129, 130]], dtype=torch.uint8), 8).tolist() == [[33409]]
    assert pack_words(torch.full((1, 8), 15, dtype=torch.uint8), 4).tolist() == [[-1]]
    assert pack_bytes(eight, 4).tolist() == [[0x10, 0x32, 0x54, 0x76]]
