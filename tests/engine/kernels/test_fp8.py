"""fp8 rows times fp8 matrices: as exact as their numbers, in every tier, with whatever scales a checkpoint has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import fp8
from engine.kernels.cpu.build import library
from engine.kernels.cpu.fp8 import Fp8Kernels
from engine.kernels.values import Matrix
from engine.quant.fp8 import DTYPE, LARGEST, Fp8Weight, quantized

DIGIT = 2.0**-4  # half of the last of e4m3's digits
TINY = 2.0**-10  # half of its smallest number


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from((1e-5, 1.0, 1e4)))
def test_a_number_is_off_by_half_a_digit_of_its_own(seed: int, size: float) -> None:
    weight = random(5, 64, seed=seed) ** 3 * size
    found = quantized(weight)
    off = (found.dequantized() - weight).abs()
    assert (off <= torch.maximum(weight.abs() * DIGIT, found.scale * TINY) * 1.001).all()
    rows, scale = fp8.quantize_rows(weight)
    assert torch.allclose(
        rows.float() * scale[:, None], found.dequantized(), rtol=2 * DIGIT, atol=float(scale.max()) * TINY
    )


def test_zeros_are_exact_and_rows_that_are_no_numbers_stay_so() -> None:
    x = torch.zeros(4, 32)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    rows, scale = fp8.quantize_rows(x)
    assert rows.dtype == DTYPE
    assert scale.isnan().tolist() == [False, True, True, False]
    assert not rows.float().isnan().any()
    assert torch.equal(quantized(torch.zeros(2, 32)).dequantized(), torch.zeros(2, 32))


def test_what_exceeds_a_given_scale_is_clamped() -> None:
    rows, scale = fp8.quantize_rows(torch.tensor([[1.0, 1000.0, -1000.0, 0.5]]), given=0.5)
    assert (rows.float() * scale[:, None]).tolist() == [[1.0, LARGEST / 2, -LARGEST / 2, 0.5]]


def matrices() -> dict[str, Matrix]:
    """Two weights one below the other: with scales of rows, of the matrix, of blocks, and for inputs."""
    found = {}
    for kind in ("rows", "matrix", "blocks", "inputs"):
        parts = []
        for rows, seed in ((64, 1), (32, 2)):
            values, scale = quantized(random(rows, 128, seed=seed)).values, random(rows, 1, seed=seed).abs() + 0.1
            if kind == "matrix":
                scale = scale[:1].expand(rows, 1)
            if kind == "blocks":
                scale = random(rows, 2, seed=seed).abs() + 0.1
            block = 64 if kind == "blocks" else 128
            parts.append(
                Fp8Weight(values=values, scale=scale, block=block, input_scale=seed / 50 if kind == "inputs" else None)
            )
        found[kind] = fp8.pack(parts, None)
        found[kind + " exact"] = torch.cat([part.dequantized() for part in parts]).double()
    return found


@pytest.mark.parametrize("kind", ["rows", "matrix", "blocks", "inputs"])
@pytest.mark.parametrize("has_tiles", [True, False])
@pytest.mark.parametrize("is_even", [True, False])
def test_products_are_those_of_the_numbers(kind: str, has_tiles: bool, is_even: bool) -> None:
    matrix, exact = (matrices()[name] for name in (kind, kind + " exact"))
    assert matrix.input_scale == (0.04 if kind == "inputs" else None), "the larger of two"
    lib = library()
    compiled = Fp8Kernels(lib, has_tiles=has_tiles and bool(lib.has_tiles()), is_even=is_even)
    for count in (1, 3, 70):
        values = random(count, 128, seed=count).bfloat16()
        rows, scale = fp8.quantize_rows(values.float(), matrix.input_scale)
        expected = (rows.double() * scale.double()[:, None]) @ exact.t()
        for found in (fp8.multiply(values, matrix), compiled.multiply(values, matrix)):
            assert float((found.dequantized() - expected).abs().max() / expected.abs().max()) < 1e-5


def test_company_changes_no_row() -> None:
    """Rows alone, and among others: the same bits, where rows are promised to be alike."""
    lib = library()
    compiled = Fp8Kernels(lib, has_tiles=bool(lib.has_tiles()), is_even=True)
    values = random(70, 128).bfloat16()
    for kind in ("rows", "blocks"):
        matrix = matrices()[kind]
        together = compiled.multiply(values, matrix).dequantized()
        assert torch.equal(compiled.multiply(values[3:4], matrix).dequantized()[0], together[3])


def test_every_number_becomes_its_bf16() -> None:
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = numbers[(numbers & 127) != 127].contiguous()  # without NaN
    out = torch.empty(len(numbers), dtype=torch.bfloat16)
    import ctypes

    library().unpack_fp8(
        ctypes.c_void_p(numbers.data_ptr()), ctypes.c_int64(len(numbers)), ctypes.c_void_p(out.data_ptr())
    )
    assert torch.equal(out.float(), numbers.view(DTYPE).float())
