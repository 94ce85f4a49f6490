"""Every operation in plain torch: the definition that faster kernels are compared with, and the fallback.

Attention reads the paged cache by gathering rows. Two recipes:

* Sequences with one query row (decodes) are sorted by length and cut into buckets of similar length; a bucket is one
  gather and one batched scaled_dot_product_attention. Padding repeats the sequence's own first key, so no stale or
  poisoned value is ever multiplied, not even by a weight of 0.
* A chunk of several rows is one gather and one call of its own, causal from its start position.

The gather and mask tensors are made once a step (`plan_attention`) and used by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear as _linear
from torch.nn.functional import scaled_dot_product_attention, silu

from engine.kernels.spans import SequenceSpan

BUCKET_WASTE = 1.125
"""Longest over shortest sequence of a bucket: bounds the padded share of the work."""
BUCKET_BYTES = 32 << 20
"""Gathered keys (and as many values) a bucket holds at most, unless one sequence alone needs more."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> Tensor:
    """x [T, hidden] float32, weight [hidden] float32 -> [T, hidden] in `out_dtype`."""
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(out_dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of each head: x [T, heads, dim], cos and sin float32 [T, 1, dim / 2] -> like x."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def best(x: Tensor, allowed: Tensor | None = None) -> Tensor:
    """x [T, n] -> the column of each row's largest value, the first of equals, of those that its mask allows; -1 where
    a value isn't finite or no column may come. `allowed` int32 [M, words] are the masks of the first M rows."""
    is_sound = x.sum(dim=-1).isfinite()
    if allowed is None:
        return torch.where(is_sound, x.argmax(dim=-1), -1)
    may_come = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    may_come[: len(allowed)] = unpacked(allowed, x.shape[-1])
    masked = torch.where(may_come, x, float("-inf"))
    return torch.where(is_sound & may_come.any(dim=-1), masked.argmax(dim=-1), -1)


def unpacked(masks: Tensor, width: int) -> Tensor:
    """Bit masks int32 [M, words], little-endian -> bool [M, width]; False behind the last word."""
    bits = (masks[:, :, None] >> torch.arange(32, device=masks.device, dtype=torch.int32)) & 1
    flat = bits.flatten(1).bool()[:, :width]
    return torch.nn.functional.pad(flat, (0, width - flat.shape[1]))


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * mlp] -> silu(gate) * up [T, mlp]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, in], weight [out, in], bias [out] -> [T, out]."""
    return _linear(x, weight, bias)


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Puts k and v [T, kv_heads, dim] into rows `slots` [T] of the caches [slots, kv_heads, dim]."""
    k_cache.index_copy_(0, slots, k.to(k_cache.dtype))
    v_cache.index_copy_(0, slots, v.to(v_cache.dtype))


@dataclass(frozen=True, slots=True)
class _Gather:
    """A batch of equal shapes: query rows [B * n], cache rows [B * L], mask [B, 1, n, L] or None (causal from 0)."""

    rows: Tensor
    slots: Tensor
    mask: Tensor | None
    batch: int


@dataclass(slots=True)
class AttentionPlan:
    """What attention needs in every layer of one step. `scratch` is reused: fresh pages cost more than the copy."""

    gathers: list[_Gather]
    num_rows: int
    scratch: dict[str, Tensor] = field(default_factory=dict)


def plan_attention(spans: list[SequenceSpan], block_tokens: int, slot_bytes: int) -> AttentionPlan:
    """Gathers and masks for one step. `slot_bytes` are the bytes of one cache row of keys."""
    plan = AttentionPlan([], sum(span.num_rows for span in spans))
    single = sorted((span for span in spans if span.num_rows == 1), key=lambda span: span.length)
    most_slots = max(BUCKET_BYTES // slot_bytes, 1)
    bucket: list[SequenceSpan] = []
    for span in single:
        is_full = bucket and (len(bucket) + 1) * span.length > most_slots
        if bucket and (is_full or span.length > bucket[0].length * BUCKET_WASTE):
            plan.gathers.append(_single_rows(bucket, block_tokens))
            bucket = []
        bucket.append(span)
    if bucket:
        plan.gathers.append(_single_rows(bucket, block_tokens))
    plan.gathers += [_chunk(span, block_tokens) for span in spans if span.num_rows > 1]
    return plan


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan) -> Tensor:
    """Causal attention of q [T, heads, dim] over the caches [slots, kv_heads, dim] -> [T, heads * dim] like q."""
    num_rows, num_heads, dim = q.shape
    out = torch.empty(num_rows, num_heads, dim, dtype=k_cache.dtype)
    q = q.to(k_cache.dtype)
    for gather in plan.gathers:
        queries = q.index_select(0, gather.rows).view(gather.batch, -1, num_heads, dim).transpose(1, 2)
        keys = _gathered("k", k_cache, gather, plan)
        values = _gathered("v", v_cache, gather, plan)
        mask = None if gather.mask is None else gather.mask.to(q.dtype)
        answer = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        out.index_copy_(0, gather.rows, answer.transpose(1, 2).reshape(-1, num_heads, dim))
    return out.view(num_rows, -1)


def _gathered(name: str, cache: Tensor, gather: _Gather, plan: AttentionPlan) -> Tensor:
    """Cache rows of a gather as [B, kv_heads, L, dim], in the plan's scratch memory."""
    size, (_, kv_heads, dim) = len(gather.slots), cache.shape
    scratch = plan.scratch.get(name)
    if scratch is None or len(scratch) < size:
        largest = max(len(other.slots) for other in plan.gathers)
        scratch = plan.scratch[name] = torch.empty(largest, kv_heads, dim, dtype=cache.dtype)
    rows = scratch[:size]
    torch.index_select(cache, 0, gather.slots, out=rows)
    return rows.view(gather.batch, -1, kv_heads, dim).transpose(1, 2)


def _slots(span: SequenceSpan, block_tokens: int) -> Tensor:
    """Cache rows of positions [0, length)."""
    needed = -(-span.length // block_tokens)
    blocks = torch.tensor(span.block_ids[:needed], dtype=torch.int64)
    return (blocks[:, None] * block_tokens + torch.arange(block_tokens)).view(-1)[: span.length]


def _single_rows(bucket: list[SequenceSpan], block_tokens: int) -> _Gather:
    longest = max(span.length for span in bucket)
    slots = torch.empty(len(bucket), longest, dtype=torch.int64)
    for row, span in zip(slots, bucket, strict=True):
        row[: span.length] = _slots(span, block_tokens)
        row[span.length :] = row[0]
    lengths = torch.tensor([span.length for span in bucket])
    is_past_end = torch.arange(longest)[None, :] >= lengths[:, None]
    mask = torch.zeros(len(bucket), 1, 1, longest).masked_fill_(is_past_end[:, None, None, :], float("-inf"))
    return _Gather(torch.tensor([span.row for span in bucket]), slots.view(-1), mask, len(bucket))


def _chunk(span: SequenceSpan, block_tokens: int) -> _Gather:
    rows = torch.arange(span.row, span.row + span.num_rows)
    mask = None
    if span.start > 0:
        is_future = torch.arange(span.length)[None, :] > torch.arange(span.start, span.length)[:, None]
        mask = torch.zeros(1, 1, span.num_rows, span.length).masked_fill_(is_future, float("-inf"))
    return _Gather(rows, _slots(span, block_tokens), mask, 1)
