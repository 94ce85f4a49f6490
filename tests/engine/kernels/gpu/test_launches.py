"""What the tier launches is what is compiled ahead of time: tiles, warps, stages, and the types of what it passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from engine.cache.pool import KVPool
from engine.kernels.gpu import attention, cache, groups, matmul, rowwise, sampling
from engine.kernels.gpu.tier import GpuKernels
from engine.kernels.gpu.variants import Variant, variants
from engine.kernels.spans import SequenceSpan
from engine.kernels.values import Matrix, Product, Rows
from engine.ondevice.llama import LLAMA_8B
from engine.staging import Staging

CPU = torch.device("cpu")
KERNELS = {
    attention: ["attend", "merge"],
    cache: ["store_qkv"],
    groups: ["multiply_groups", "dequantize"],
    matmul: ["multiply"],
    rowwise: ["norm_rows", "pack_rows", "add_normed_rows", "silu_mul"],
    sampling: ["best_rows", "sample_rows"],
}
TILES = {"M", "N", "K", "ROWS", "KEYS", "GROUP", "BITS", "DIM", "FORMAT", "IS_INT8", "IS_SCALED", "WIDTH", "SIZE"}
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
OPTIONAL = {  # what another tensor stands for where it isn't there
    "k_scale": {"IS_SCALED", "FORMAT"}, "v_scale": {"IS_SCALED", "FORMAT"}, "row_scale": {"HAS_SCALES"},
    "column_scale": {"HAS_SCALES"}, "bias": {"HAS_BIAS"}, "zero": {"HAS_ZERO"}, "qk_norm": {"HAS_QK_NORM"},
    "delta": {"HAS_DELTA"}, "scale": {"FORMAT"},
}  # fmt: skip
Launch = tuple[str, dict[str, Any]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """All launches, none of which runs."""
    seen: list[Launch] = []

    def watched(name: str, kernel: Any) -> Any:
        names = list(inspect.signature(kernel.fn).parameters)

        class Watched:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                assert all(size > 0 for size in grid), name
                return lambda *values, **more: seen.append((name, dict(zip(names, values, strict=False)) | more))

        return Watched()

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    return seen


def matrix(weights: str, rows: int, columns: int) -> Matrix:
    """Whose numbers nobody reads."""
    kinds = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    if weights in kinds:
        scale = None if weights == "bf16" else torch.empty(rows)
        packed = torch.empty(rows, columns, dtype=kinds[weights])
        return Matrix(packed=packed, num_rows=rows, num_columns=columns, scale=scale, bias=torch.empty(rows))
    bits, group = int(weights[1]), 128
    return Matrix(
        packed=torch.empty(rows, columns * bits // 8, dtype=torch.uint8),
        num_rows=rows,
        num_columns=columns,
        scale=torch.empty(rows, columns // group),
        zero=torch.empty(rows, columns // group, dtype=torch.int16),
        bits=bits,
    )


def run_rows(weights: str, kv: str, count: int) -> None:
    model = LLAMA_8B
    op = GpuKernels(model, weight_format=weights, kv_format=kv, block_tokens=16, device=CPU)
    heads = model.num_heads + 2 * model.num_kv_heads
    x, norm = torch.empty(count, model.hidden), torch.empty(model.hidden)
    rows = op.norm(x, norm, 1e-5)
    qkv: Product = op.linear(rows, matrix(weights, heads * model.head_dim, model.hidden))
    turns = torch.empty(count, model.head_dim // 2)
    pool = KVPool(model, kv_format=kv, block_tokens=16, num_blocks=2, layout=op.layout)
    slots = torch.zeros(count, dtype=torch.int64)
    q = op.store_qkv(qkv, turns, turns, *pool.layer(0), slots, torch.empty(2, model.head_dim))
    spans = [SequenceSpan(i, 1, 700, tuple(range(44))) for i in range(count)]
    plan, _ = op.place(op.plan_attention(spans), [], Staging(CPU).send)
    mixed = op.pack_rows(op.attend(q, *pool.layer(0), plan))
    out = matrix(weights, model.hidden, model.num_heads * model.head_dim)
    op.linear_add(mixed, out, x)
    op.linear_add(mixed, out, x, norm)
    gated: Rows = op.linear_gated(rows, matrix(weights, 2 * model.mlp, model.hidden))
    op.linear_add(gated, matrix(weights, model.hidden, model.mlp), x)
    head = matrix("bf16" if weights == "fp8" else weights, model.vocab_size, model.hidden)
    op.best(rows, head)
    numbers, masks = torch.empty(count, 4), torch.empty(count, 4, dtype=torch.int32)
    op.draw(torch.empty(count, 4096), numbers, torch.empty(count, dtype=torch.int32), masks)


def why_not(launch: Launch, variant: Variant) -> Iterator[str]:
    name, given = launch
    constants, types = dict(variant.constants), dict(variant.types)
    for key, value in constants.items():
        if key in TILES and int(given[key]) != value:
            yield f"{key} {int(given[key])} for {value}"
    how = given.get("num_warps", 4), given.get("num_stages", 3)
    if how != (variant.warps, variant.stages):
        yield f"warps and stages {how} for {(variant.warps, variant.stages)}"
    for key, kind in types.items():
        flags = OPTIONAL.get(key, set()) & given.keys()
        if not kind.startswith("*") or (flags and not any(given[flag] for flag in flags)):
            continue
        is_sum = name == "multiply_groups" and key == "out"  # the one that needs most registers is compiled
        if not is_sum and TYPES[given[key].dtype] != kind:
            yield f"{key} {TYPES[given[key].dtype]} for {kind}"


@pytest.mark.parametrize("weights", ["bf16", "int8", "fp8", "w4a16", "w8a16"])
def test_what_is_launched_was_compiled_ahead_of_time(launched: list[Launch], weights: str) -> None:
    for kv, count in (("bf16", 1), ("int8", 17), ("fp8", 65), ("bf16", 200)):
        run_rows(weights, kv, count)
    assert len({name for name, _ in launched}) >= 10
    for launch in launched:
        mine = [variant for variant in variants() if variant.kernel == launch[0]]
        reasons = [list(why_not(launch, variant)) for variant in mine]
        assert not min(reasons, key=len), (launch[0], min(reasons, key=len))
