"""Products with weights in groups: compiled and plain ones against the product with the weights they stand for."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import groups
from engine.kernels.cpu.build import library
from engine.kernels.cpu.group_matmul import FEW_ROWS, GroupKernels
from engine.kernels.values import Matrix
from engine.quant.groups import GroupedWeight, Scheme, round_to_nearest
from tests.engine.kernels.test_cpu import OLDER, older_flags

ROWS = (1, 2, 7, 8, 9, FEW_ROWS, FEW_ROWS + 1, 40)


def weights(bits: int, group: int, *, symmetric: bool) -> list[GroupedWeight]:
    generator = torch.Generator().manual_seed(bits + group)
    scheme = Scheme(bits=bits, group=group, symmetric=symmetric)
    return [round_to_nearest(torch.randn(rows, 4 * group, generator=generator) + 0.3, scheme) for rows in (48, 16, 5)]


def rows_of(count: int, columns: int) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).bfloat16()


def exact(values: torch.Tensor, parts: list[GroupedWeight]) -> torch.Tensor:
    return values.double() @ torch.cat([part.dequantized() for part in parts]).double().t()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 8), (4, 16), (8, 16), (4, 32), (4, 96), (8, 64), (8, 128)])
def test_products_are_those_of_the_weights(bits: int, group: int, symmetric: bool) -> None:
    parts = weights(bits, group, symmetric=symmetric)
    matrix = groups.pack(parts, None)
    assert (matrix.zero is None) == symmetric
    assert matrix.packed.numel() * 8 == matrix.num_rows * matrix.num_columns * bits
    compiled, even = (GroupKernels(library(), is_even=is_even) for is_even in (False, True))
    for count in ROWS:
        values = rows_of(count, matrix.num_columns)
        expected = exact(values, parts)
        found = compiled.multiply(values, matrix)
        is_few = count <= FEW_ROWS and matrix.num_columns % 64 == 0
        assert error(found, expected) < (1e-4 if is_few else 0.01)
        assert error(groups.multiply(values, matrix), expected) < 0.01
        assert torch.equal(even.multiply(values, matrix), groups.multiply(values, matrix)), "the same bf16 weights"


@pytest.mark.parametrize("build", OLDER)
def test_older_processors_compute_the_same(build: str) -> None:
    older = GroupKernels(library(older_flags(build)), is_even=False)
    for bits, group in ((4, 64), (8, 64), (4, 16), (8, 16)):
        parts = weights(bits, group, symmetric=False)
        matrix = groups.pack(parts, None)
        for count in (3, 20):
            values = rows_of(count, matrix.num_columns)
            assert error(older.multiply(values, matrix), exact(values, parts)) < (1e-4 if count == 3 else 0.01)


def test_large_matrices_go_panel_by_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = groups.pack(weights(4, 64, symmetric=True), None)
    values = rows_of(20, matrix.num_columns)
    whole = GroupKernels(library(), is_even=False).multiply(values, matrix)
    monkeypatch.setattr("engine.kernels.cpu.group_matmul._PANEL_BYTES", 2 * 10 * matrix.num_columns)
    assert torch.equal(GroupKernels(library(), is_even=False).multiply(values, matrix), whole)


def test_zeros_of_gptq_files_go_up_to_sixteen() -> None:
    (part, *_) = weights(4, 32, symmetric=True)
    zero = torch.arange(17).repeat(12)[: part.scale.numel()].view(part.scale.shape).to(torch.int16)
    part = GroupedWeight(bits=4, codes=part.codes, scale=part.scale, zero=zero)
    values = rows_of(2, 128)
    found = GroupKernels(library(), is_even=False).multiply(values, groups.pack([part], None))
    assert error(found, exact(values, [part])) < 1e-4


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 16), (4, 32), (8, 32), (4, 64)])
def test_zeros_may_lie_between_codes(bits: int, group: int) -> None:
    """As in GGUF's Q4_1: value = code * step + least. Beside a matrix whose zeros are codes."""
    one, other, _ = weights(bits, group, symmetric=False)
    between = torch.randn(one.scale.shape, generator=torch.Generator().manual_seed(0)) * 9
    parts = [GroupedWeight(bits=bits, codes=one.codes, scale=one.scale, zero=between), other]
    matrix = groups.pack(parts, None)
    for count in ROWS:
        values = rows_of(count, matrix.num_columns)
        expected = exact(values, parts)
        compiled = GroupKernels(library(), is_even=False).multiply(values, matrix)
        assert error(compiled, expected) < (1e-4 if count <= FEW_ROWS else 0.01)
        assert error(groups.multiply(values, matrix), expected) < 0.01


def test_a_matrix_without_zeros_beside_one_with() -> None:
    one, _, other = weights(4, 32, symmetric=True)
    other = GroupedWeight(bits=4, codes=other.codes, scale=other.scale, zero=torch.full_like(other.scale, 3).byte())
    matrix: Matrix = groups.pack([one, other], None)
    values = rows_of(4, 128)
    assert error(groups.multiply(values, matrix), exact(values, [one, other])) < 0.01


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_no_other(number: float) -> None:
    matrix = groups.pack(weights(4, 64, symmetric=True), None)
    values = rows_of(3, matrix.num_columns)
    sound = GroupKernels(library(), is_even=False).multiply(values, matrix)
    values[1, 5] = number
    found = GroupKernels(library(), is_even=False).multiply(values, matrix)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], sound[[0, 2]])


def test_a_row_of_zeros_gives_zeros() -> None:
    matrix = groups.pack(weights(8, 32, symmetric=False), None)
    found = GroupKernels(library(), is_even=False).multiply(torch.zeros(1, matrix.num_columns).bfloat16(), matrix)
    assert torch.equal(found, torch.zeros_like(found))
