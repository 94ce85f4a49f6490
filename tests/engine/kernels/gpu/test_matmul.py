"""Products on the GPU path, of floats, int8, fp8 and codes in groups, against plain torch."""

import pytest
import torch
import triton

from engine.kernels.gpu import groups, matmul
from engine.quant.groups import Scheme, round_to_nearest
from engine.quant.pack import pack_bytes

SHAPES = [(1, 64, 64), (3, 40, 96), (17, 130, 200), (70, 96, 64)]


def multiply(rows, weight, out, *, row=None, column=None, bias=None, adds=False):
    tile = matmul.tile_for(len(rows), len(weight), adds=adds)
    grid = (triton.cdiv(len(rows), tile.rows) * triton.cdiv(len(weight), tile.columns),)
    matmul.multiply[grid](
        rows, weight, out if row is None else row, out if column is None else column, out if bias is None else bias,
        out, len(rows), len(weight), rows.shape[1], M=tile.rows, N=tile.columns, K=tile.depth,
        IS_INT8=rows.dtype == torch.int8, HAS_SCALES=row is not None, HAS_BIAS=bias is not None, ADDS=adds,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    m, n, k = shape
    rows, weight, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n)
    out = multiply(rows, weight, torch.full((m, n), float("nan")), bias=bias)
    torch.testing.assert_close(out.double(), rows.double() @ weight.double().T + bias, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_sums_are_exact(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    m, n, k = shape
    rows = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    ones = torch.ones(m), torch.ones(n)
    out = multiply(rows, weight, torch.full((m, n), float("nan")), row=ones[0], column=ones[1])
    assert torch.equal(out, (rows.int() @ weight.int().T).float())


def test_scales_of_rows_and_columns_and_the_residual() -> None:
    torch.manual_seed(2)
    rows = torch.randint(-127, 128, (5, 64), dtype=torch.int8)
    weight = torch.randint(-127, 128, (33, 64), dtype=torch.int8)
    row, column, x = torch.rand(5), torch.rand(33), torch.randn(5, 33)
    wanted = x + (rows.int() @ weight.int().T) * row[:, None] * column
    torch.testing.assert_close(multiply(rows, weight, x, row=row, column=column, adds=True), wanted)


def test_fp8() -> None:
    torch.manual_seed(3)
    rows, weight = (torch.randn(n, 64).to(torch.float8_e4m3fn) for n in (5, 48))
    row, column = torch.rand(5), torch.rand(48)
    out = multiply(rows, weight, torch.full((5, 48), float("nan")), row=row, column=column)
    torch.testing.assert_close(out, rows.float() @ weight.float().T * row[:, None] * column, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", groups.SIZES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups(bits: int, group: int, symmetric: bool) -> None:
    torch.manual_seed(group)
    m, n, k = 3, 70, 256
    weight = round_to_nearest(torch.randn(n, k), Scheme(bits=bits, group=group, symmetric=symmetric))
    rows = torch.randn(m, k)
    codes, out = pack_bytes(weight.codes, bits), torch.full((m, n), float("nan"))
    zero = weight.zero
    shape = {"K": min(group, 64), "GROUP": group, "BITS": bits, "HAS_ZERO": zero is not None}
    groups.multiply_groups[(triton.cdiv(n, 64),)](
        rows, codes, weight.scale, codes if zero is None else zero, out, out, m, n, k, M=16, N=64,
        HAS_BIAS=False, ADDS=False, **shape,
    )  # fmt: skip
    torch.testing.assert_close(out, rows @ weight.dequantized().T, rtol=1e-4, atol=1e-3)
    dense = torch.full((n, k), float("nan"))
    groups.dequantize[(triton.cdiv(n, 32), k // shape["K"])](
        codes, weight.scale, codes if zero is None else zero, dense, n, k, N=32, **shape
    )
    assert torch.equal(dense, weight.dequantized())


def test_every_tile_is_taken_once() -> None:
    """The order of tiles is a permutation of them, for odd sizes too."""

    @triton.jit
    def mark(out, num_rows, num_columns, across):
        i, j = matmul.tile_of(triton.language.program_id(0), num_rows, num_columns, 16, 32)
        triton.language.atomic_add(out + i * across + j, 1)

    for rows, columns in ((1, 1), (17, 33), (300, 65), (129, 200)):
        down, across = triton.cdiv(rows, 16), triton.cdiv(columns, 32)
        taken = torch.zeros(down * across, dtype=torch.int32)
        mark[(down * across,)](taken, rows, columns, across)
        assert taken.tolist() == [1] * (down * across)
