"""What only some families have, in the C++ kernels: biases, norms of heads, norms behind, GeGLU, windows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.cpu import BLOCK_TOKENS, CpuKernels
from engine.kernels.spans import SequenceSpan
from engine.kernels.torch_tier import TorchKernels
from tests.engine.kernels.test_cpu import BUILDS, FORMATS, LOG2_E, MODEL, assert_near, filled_caches, random, use, value

GEMMA = replace(MODEL, activation="gelu", query_scalar=40.0, has_qk_norm=True, has_post_norms=True, norm_eps=1e-3)


def tiers(weight_format: str) -> tuple[CpuKernels, TorchKernels]:
    cpu = CpuKernels(GEMMA, weight_format=weight_format, kv_format="bf16", block_tokens=BLOCK_TOKENS)
    return cpu, TorchKernels(GEMMA, weight_format=weight_format, kv_format="bf16", block_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_geglu_and_norms_behind_are_the_reference(weight_format: str, rows: int, build: str) -> None:
    cpu, plain = tiers(weight_format)
    use(cpu, build)
    x, matrix = random(rows, MODEL.hidden) * 7, random(2 * MODEL.mlp, MODEL.hidden, seed=2) / 10
    ready, packed, unpacked = plain.pack_rows(x), cpu.pack_matrix(matrix, None), plain.pack_matrix(matrix, None)
    gated = value(cpu.linear_gated(ready, packed))
    assert_near(gated, value(plain.linear_gated(ready, unpacked)), 2.0)
    norm = random(2 * MODEL.mlp, seed=3)
    residual, other = random(rows, 2 * MODEL.mlp, seed=4), random(rows, 2 * MODEL.mlp, seed=4)
    cpu.linear_add(ready, packed, residual, norm)
    plain.linear_add(ready, unpacked, other, norm)
    assert_near(residual, other, 1.0)
    alone = random(rows, 2 * MODEL.mlp, seed=4)[:1].contiguous()
    first = replace(ready, values=ready.values[:1], scale=None if ready.scale is None else ready.scale[:1])
    cpu.linear_add(first, packed, alone, norm)
    if packed.is_tiled:
        assert torch.equal(alone, residual[:1]), "a row doesn't depend on the rows beside it"


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("build", BUILDS)
def test_biased_and_normalized_heads_are_the_reference(weight_format: str, has_bias: bool, build: str) -> None:
    cpu, plain = tiers(weight_format)
    use(cpu, build)
    heads, slots = MODEL.num_heads + 2 * MODEL.num_kv_heads, torch.tensor([33, 14, 15])
    matrix, x = random(heads * MODEL.head_dim, MODEL.hidden) / 10, random(len(slots), MODEL.hidden, seed=1)
    bias = random(heads * MODEL.head_dim, seed=5) if has_bias else None
    turns, norms = random(len(slots), MODEL.head_dim // 2, seed=2), 1 + random(2, MODEL.head_dim, seed=6) / 3
    rows, found = plain.pack_rows(x), []
    for tier in (cpu, plain):
        k, v = filled_caches(tier, 3)
        product = tier.linear(rows, tier.pack_matrix(matrix, bias))
        q = tier.store_qkv(product, turns.cos(), turns.sin(), k, v, slots, norms)
        found.append((q, tier.layout.k_to_wire(k), tier.layout.v_to_wire(v)))
    (q, k, v), (want_q, want_k, want_v) = found
    assert_near(q.float(), want_q.float() * 40.0**-0.5 * LOG2_E, 1.0)
    for got, want in ((k, want_k), (v, want_v)):
        written = ~want.isnan()
        assert_near(got[written].float()[None], want[written].float()[None], 1.0)


def test_chunks_that_no_window_reaches_are_not_touched() -> None:
    """Three sequences that share a prefix, of which two look back into the shared part and one into its own."""
    cpu, _ = tiers("bf16")
    shared = tuple(range(16))
    spans = [
        SequenceSpan(0, 1, 270, (*shared, 16, 17)),
        SequenceSpan(1, 3, 260, (*shared, 18, 19)),
        SequenceSpan(4, 2, 400, (*shared, *range(20, 40))),
    ]
    wire = random(2, 40, MODEL.num_kv_heads, BLOCK_TOKENS, MODEL.head_dim).bfloat16()
    q = random(6, MODEL.num_heads, MODEL.head_dim).bfloat16()
    plan, found = cpu.plan_attention(spans), []
    for value_outside in (1.0, float("nan")):
        wire[:, :12] = value_outside  # positions before 192: further back than 64 before the first row's
        k, v = cpu.layout.k_from_wire(wire[0]).contiguous(), cpu.layout.v_from_wire(wire[1]).contiguous()
        found.append(cpu.attend(q, k, v, plan, 64))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
