"""Norm, gate and formats of rows on the GPU path against the definitions in plain torch."""

import pytest
import torch
import triton

from engine.kernels import int8, reference
from engine.kernels.gpu import rowwise

WIDTHS = [64, 192, 576]


def outputs(count: int, width: int, form: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned, so that what isn't written is seen."""
    kind = {rowwise.FLOAT: dtype, rowwise.INT8: torch.int8, rowwise.FP8: torch.float8_e4m3fn}[form]
    out = torch.full((count, width), 77.0).to(kind)
    return out, torch.full((count,), 1e30)


def normed(x, weight, form, dtype=torch.float32, delta=None):
    out, scale = outputs(len(x), x.shape[1], form, dtype)
    rowwise.norm_rows[(len(x),)](
        x, x if delta is None else delta, weight, out, scale, 1e-5,
        WIDTH=x.shape[1], SIZE=triton.next_power_of_2(x.shape[1]), HAS_DELTA=delta is not None, FORMAT=form,
    )  # fmt: skip
    return out, scale


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_is_rms_norm(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight = torch.randn(5, width) * 3, torch.randn(width)
    out, _ = normed(x, weight, rowwise.FLOAT, dtype)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5, dtype), rtol=2e-3, atol=2e-3)


def test_norm_adds_what_comes_in_and_keeps_the_sum() -> None:
    torch.manual_seed(1)
    x, delta, weight = torch.randn(3, 96), torch.randn(3, 96), torch.ones(96)
    total = x + delta
    out, _ = normed(x, weight, rowwise.FLOAT, delta=delta)
    assert torch.equal(x, total)
    torch.testing.assert_close(out, reference.rms_norm(total, weight, 1e-5, torch.float32))


@pytest.mark.parametrize("width", WIDTHS)
def test_int8_rows_are_those_of_the_definition(width: int) -> None:
    torch.manual_seed(width)
    x = torch.randn(7, width) * 5
    out, scale = outputs(7, width, rowwise.INT8, torch.float32)
    rowwise.pack_rows[(7,)](x, out, scale, WIDTH=width, SIZE=triton.next_power_of_2(width), FORMAT=rowwise.INT8)
    values, scales = int8.quantize_rows(int8.rotate(x))
    torch.testing.assert_close(scale, scales)
    assert (out.int() - values.int()).abs().max() <= 1, "they differ by a rounding at most"
    assert (out != values).float().mean() < 0.01


def test_fp8_rows_keep_three_digits_of_two() -> None:
    x = torch.randn(4, 128) * 10
    out, scale = outputs(4, 128, rowwise.FP8, torch.float32)
    rowwise.pack_rows[(4,)](x, out, scale, WIDTH=128, SIZE=128, FORMAT=rowwise.FP8)
    torch.testing.assert_close(scale, x.abs().amax(1) / 448)
    torch.testing.assert_close(out.float() * scale[:, None], x, rtol=2**-4, atol=float(scale.max()) * 2**-9)


@pytest.mark.parametrize("form", [rowwise.INT8, rowwise.FP8])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_nan_afterwards_and_no_other(form: int, poison: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = poison
    out, scale = outputs(3, 64, form, torch.float32)
    rowwise.pack_rows[(3,)](x, out, scale, WIDTH=64, SIZE=64, FORMAT=form)
    assert scale.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("form", [rowwise.FLOAT, rowwise.INT8])
def test_a_row_of_zeros_stays_zero(form: int) -> None:
    out, scale = outputs(1, 64, form, torch.float32)
    rowwise.pack_rows[(1,)](torch.zeros(1, 64), out, scale, WIDTH=64, SIZE=64, FORMAT=form)
    assert not out.any()
    assert form == rowwise.FLOAT or scale.item() == 0


@pytest.mark.parametrize(("width", "activation"), [(64, "silu"), (160, "silu"), (96, "gelu")])
def test_gate(width: int, activation: str) -> None:
    torch.manual_seed(2)
    gate_up = torch.randn(4, 2 * width) * 4
    out, scale = outputs(4, width, rowwise.FLOAT, torch.float32)
    rowwise.silu_mul[(4,)](
        gate_up, out, scale,
        WIDTH=width, SIZE=triton.next_power_of_2(width), FORMAT=rowwise.FLOAT, IS_GELU=activation == "gelu",
    )  # fmt: skip
    torch.testing.assert_close(out, reference.gated(gate_up, activation))


def test_what_is_normed_before_it_is_added() -> None:
    torch.manual_seed(4)
    x, delta, weight = torch.randn(3, 96), torch.randn(3, 96) * 5, torch.randn(96)
    wanted = x + reference.rms_norm(delta, weight, 1e-6, torch.float32)
    rowwise.add_normed_rows[(3,)](x, delta, weight, 1e-6, WIDTH=96, SIZE=128)
    torch.testing.assert_close(x, wanted)
