"""W8A8: an exact change of basis, a bounded rounding error, exact sums, and NaN that doesn't get lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import int8
from engine.kernels.values import Product


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_rotation_is_its_own_inverse_and_keeps_products() -> None:
    x, w = random(5, 192), random(7, 192, seed=1)
    torch.testing.assert_close(int8.rotate(int8.rotate(x)), x)
    torch.testing.assert_close(int8.rotate(x) @ int8.rotate(w).t(), x @ w.t(), atol=1e-4, rtol=1e-4)


@given(st.integers(0, 99), st.floats(1e-6, 1e6))
def test_a_row_is_off_by_at_most_half_a_step(seed: int, size: float) -> None:
    x = random(3, 64, seed=seed) * size
    values, scale = int8.quantize_rows(x)
    assert ((values.float() * scale[:, None] - x).abs() <= scale[:, None] * 0.5001).all()
    assert (values.abs().amax(dim=1) == 127).all()


def test_zero_rows_stay_zero_and_rows_that_are_not_finite_are_marked() -> None:
    x = torch.zeros(4, 64)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    values, scale = int8.quantize_rows(x)
    assert not values.any()
    assert scale.isnan().tolist() == [False, True, True, False]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.sampled_from([64, 192, 576]), st.sampled_from([16, 48, 320]), st.integers(0, 99))
def test_products_are_integer_sums_with_their_scales(rows: int, columns: int, out: int, seed: int) -> None:
    x, w = random(rows, columns, seed=seed), random(out, columns, seed=seed + 1)
    matrix = int8.pack(w, None)
    values, scale = int8.quantize_rows(int8.rotate(x))
    weight, column = int8.quantize_rows(int8.rotate(w))
    want = (values.long() @ weight.long().t()).float() * scale[:, None] * column
    got = Product(int8.multiply(values, matrix), scale, matrix.scale).dequantized()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert (got - x @ w.t()).norm() / (x @ w.t()).norm() < 0.03


@pytest.mark.parametrize("backend", [int8._IntMm, int8._OneDnn])
def test_a_backend_that_is_wrong_is_not_used(backend: type, monkeypatch: pytest.MonkeyPatch) -> None:
    right = backend.multiply
    monkeypatch.setattr(backend, "multiply", staticmethod(lambda *args: right(*args) + 1))
    assert int8._try(backend) is None
    monkeypatch.undo()
    assert int8._try(backend) is not None
