"""The plain-torch operations against obvious expressions, over round and weird shapes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import SequenceSpan, reference

ROWS_AND_WIDTHS = [(1, 2), (3, 64), (17, 576), (5, 130)]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(("rows", "width"), ROWS_AND_WIDTHS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
    x, weight = random(rows, width) * 5, random(width)
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = reference.rms_norm(x, weight, 1e-5, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 64), (12, 80)])
def test_rope_turns_pairs_as_complex_numbers(heads: int, dim: int) -> None:
    x, turns = random(7, heads, dim), torch.rand(7, 1, dim // 2) * 6
    pairs = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 :].double())
    turned = pairs * torch.polar(torch.ones_like(turns, dtype=torch.float64), turns.double())
    got = reference.rope(x, turns.cos(), turns.sin())
    torch.testing.assert_close(got.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("rows", "width"), ROWS_AND_WIDTHS)
def test_gated_units(rows: int, width: int) -> None:
    x = random(rows, width).double()
    gate, up = x[:, : width // 2], x[:, width // 2 :]
    torch.testing.assert_close(reference.gated(x, "silu"), gate / (1 + (-gate).exp()) * up)
    bent = (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()
    torch.testing.assert_close(reference.gated(x, "gelu"), gate / 2 * (1 + bent) * up)


def test_writing_the_cache_moves_bits() -> None:
    k_cache, v_cache = torch.zeros(2, 40, 3, 8)
    k, v = random(5, 3, 8), random(5, 3, 8) + 1
    slots = torch.tensor([39, 0, 7, 8, 22])
    reference.write_cache(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots], k)
    assert torch.equal(v_cache[slots], v)
    untouched = torch.ones(40, dtype=torch.bool).index_fill(0, slots, False)
    assert not k_cache[untouched].any()
    assert not v_cache[untouched].any()


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, window: int) -> torch.Tensor:
    """One query row [heads, dim] at `position` over k and v [length, kv_heads, dim], in float64."""
    rows, seen = [], slice(max(0, position + 1 - window) if window else 0, position + 1)
    for head in range(q.shape[0]):
        kv_head = head * k.shape[1] // q.shape[0]
        scores = (k[seen, kv_head].double() @ q[head].double()) / math.sqrt(q.shape[1])
        rows.append(scores.softmax(-1) @ v[seen, kv_head].double())
    return torch.stack(rows)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 1, 1, 2, 5, 23])), min_size=1, max_size=8),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3)]),
    dim=st.sampled_from([2, 16, 64, 80]),
    block_tokens=st.sampled_from([1, 5, 16]),
    bucket_bytes=st.sampled_from([reference.BUCKET_BYTES, 4096]),
    window=st.sampled_from([0, 0, 1, 7, 16, 60]),
)
def test_paged_attention_is_dense_attention(
    spans: list[tuple[int, int]], heads: tuple[int, int], dim: int, block_tokens: int, bucket_bytes: int, window: int
) -> None:
    """Blocks in random order; everything that is no key of the sequence, or that none of its rows sees, holds NaN and
    must not be touched."""
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(dim)
    needed = [-(-(start + size) // block_tokens) for start, size in spans]
    order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    k_cache, v_cache = torch.full((2, (sum(needed) + 2) * block_tokens, kv_heads, dim), float("nan"))
    items, wants, row = [], [], 0
    q = torch.randn(sum(size for _, size in spans), num_heads, dim, generator=generator)
    for (start, size), count in zip(spans, needed, strict=True):
        blocks = tuple(order.pop() for _ in range(count))
        k, v = torch.randn(2, start + size, kv_heads, dim, generator=generator)
        slots = torch.tensor([blocks[p // block_tokens] * block_tokens + p % block_tokens for p in range(start + size)])
        first = max(0, start + 1 - window) if window else 0
        reference.write_cache(k[first:], v[first:], k_cache, v_cache, slots[first:])
        items.append(SequenceSpan(row, size, start, (*blocks, 10**6)))
        wants += [dense(q[row + i], k, v, start + i, window) for i in range(size)]
        row += size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "BUCKET_BYTES", bucket_bytes)
        plan = reference.plan_attention(items, block_tokens, kv_heads * dim * 4, window)
    got = reference.paged_attention(q, k_cache, v_cache, plan)
    want = torch.stack(wants).flatten(1)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    again = reference.paged_attention(q, k_cache, v_cache, plan)
    assert torch.equal(got, again), "the scratch memory of a plan may not leak from layer to layer"


def test_buckets_waste_little_and_cover_all_rows() -> None:
    spans = [SequenceSpan(row, 1, row * 7, tuple(range(row + 1))) for row in range(200)]
    plan = reference.plan_attention(spans, 16, 384)
    assert sorted(torch.cat([g.rows for g in plan.gathers]).tolist()) == list(range(200))
    real, padded = sum(span.length for span in spans), sum(len(g.slots) for g in plan.gathers)
    assert padded < real * reference.BUCKET_WASTE
