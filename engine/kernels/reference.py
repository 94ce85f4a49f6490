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
from torch.nn.functional import gelu, scaled_dot_product_attention, silu
from torch.nn.functional import linear as _linear

from engine.kernels import scaled_cache
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


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2 * mlp] -> silu(gate) * up, or gelu(gate) * up [T, mlp]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up


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


def plan_attention(spans: list[SequenceSpan], block_tokens: int, slot_bytes: int, window: int = 0) -> AttentionPlan:
    """Gathers and masks for one step, of layers whose rows look back `window` tokens (0: all). `slot_bytes` are the
    bytes of one cache row of keys."""
    plan = AttentionPlan([], sum(span.num_rows for span in spans))
    seen = [_Seen.of(span, window) for span in spans]
    single = sorted((one for one in seen if one.span.num_rows == 1), key=lambda one: one.count)
    most_slots = max(BUCKET_BYTES // slot_bytes, 1)
    bucket: list[_Seen] = []
    for one in single:
        is_full = bucket and (len(bucket) + 1) * one.count > most_slots
        if bucket and (is_full or one.count > bucket[0].count * BUCKET_WASTE):
            plan.gathers.append(_single_rows(bucket, block_tokens))
            bucket = []
        bucket.append(one)
    if bucket:
        plan.gathers.append(_single_rows(bucket, block_tokens))
    plan.gathers += [_chunk(one, window, block_tokens) for one in seen if one.span.num_rows > 1]
    return plan


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scaled: torch.dtype | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of q [T, heads, dim] over the caches [slots, kv_heads, dim] -> [T, heads * dim] of their type.

    `scale` multiplies the scores (default: 1 over the root of dim).
    `scaled`: the caches are bytes of numbers of that type and their scales (scaled_cache.py), read as float32."""
    num_rows, num_heads, dim = q.shape
    dtype = k_cache.dtype if scaled is None else torch.float32
    out = torch.empty(num_rows, num_heads, dim, dtype=dtype)
    q = q.to(dtype)
    for gather in plan.gathers:
        queries = q.index_select(0, gather.rows).view(gather.batch, -1, num_heads, dim).transpose(1, 2)
        keys = _gathered("k", k_cache, gather, plan, scaled)
        values = _gathered("v", v_cache, gather, plan, scaled)
        mask = None if gather.mask is None else gather.mask.to(q.dtype)
        answer = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        out.index_copy_(0, gather.rows, answer.transpose(1, 2).reshape(-1, num_heads, dim))
    return out.view(num_rows, -1)


def _gathered(name: str, cache: Tensor, gather: _Gather, plan: AttentionPlan, scaled: torch.dtype | None) -> Tensor:
    """Cache rows of a gather as [B, kv_heads, L, dim], in the plan's scratch memory unless they have scales."""
    size, (_, kv_heads, dim) = len(gather.slots), cache.shape
    if scaled is not None:
        read = scaled_cache.read(cache.index_select(0, gather.slots), scaled)
        return read.view(gather.batch, -1, kv_heads, read.shape[-1]).transpose(1, 2)
    scratch = plan.scratch.get(name)
    if scratch is None or len(scratch) < size:
        largest = max(len(other.slots) for other in plan.gathers)
        scratch = plan.scratch[name] = torch.empty(largest, kv_heads, dim, dtype=cache.dtype)
    rows = scratch[:size]
    torch.index_select(cache, 0, gather.slots, out=rows)
    return rows.view(gather.batch, -1, kv_heads, dim).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The positions [first, span.length) that some row of a span sees."""

    span: SequenceSpan
    first: int

    @classmethod
    def of(cls, span: SequenceSpan, window: int) -> _Seen:
        return cls(span, max(0, span.start + 1 - window) if window else 0)

    @property
    def count(self) -> int:
        return self.span.length - self.first

    def slots(self, block_tokens: int) -> Tensor:
        """Their cache rows."""
        begin = self.first // block_tokens
        blocks = torch.tensor(self.span.block_ids[begin : -(-self.span.length // block_tokens)], dtype=torch.int64)
        rows = (blocks[:, None] * block_tokens + torch.arange(block_tokens)).view(-1)
        return rows[self.first - begin * block_tokens :][: self.count]


def _single_rows(bucket: list[_Seen], block_tokens: int) -> _Gather:
    longest = max(one.count for one in bucket)
    slots = torch.empty(len(bucket), longest, dtype=torch.int64)
    for row, one in zip(slots, bucket, strict=True):
        row[: one.count] = one.slots(block_tokens)
        row[one.count :] = row[0]
    counts = torch.tensor([one.count for one in bucket])
    is_past_end = torch.arange(longest)[None, :] >= counts[:, None]
    mask = torch.zeros(len(bucket), 1, 1, longest).masked_fill_(is_past_end[:, None, None, :], float("-inf"))
    return _Gather(torch.tensor([one.span.row for one in bucket]), slots.view(-1), mask, len(bucket))


def _chunk(one: _Seen, window: int, block_tokens: int) -> _Gather:
    span = one.span
    rows = torch.arange(span.row, span.row + span.num_rows)
    mask = None
    if span.start > 0 or (window and span.num_rows > window):
        keys, at = torch.arange(one.first, span.length)[None, :], torch.arange(span.start, span.length)[:, None]
        is_hidden = (keys > at) | (keys <= at - window) if window else keys > at
        mask = torch.zeros(1, 1, span.num_rows, one.count).masked_fill_(is_hidden, float("-inf"))
    return _Gather(rows, one.slots(block_tokens), mask, 1)
