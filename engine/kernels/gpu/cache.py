"""The kernel behind the QKV matmul: turns q and k by their positions, and writes k and v into their slots of the cache.

Where a model normalizes queries and keys head by head, that comes first.

A block of the cache is [kv_heads][tokens][head_dim]; where KV is quantized, each head's values are followed by one
float32 scale a token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.common import rounded, to_fp8
from engine.kernels.gpu.rowwise import LARGEST_FP8


@triton.jit
def store_qkv(
    qkv, cosine, sine, slots, q, k, v, k_scale, v_scale, qk_norm, q_factor, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, FORMAT: tl.constexpr, HAS_QK_NORM: tl.constexpr,
):  # fmt: skip
    """Program (row, head): qkv [rows, (HEADS + 2 KV_HEADS) * DIM] -> q [rows, HEADS, DIM] times `q_factor`, and the
    caches. FORMAT as in rowwise.py, but int8 isn't rotated: one scale a token and head. qk_norm float32 [2, DIM]: of
    queries, of keys."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    i = tl.arange(0, HALF_SIZE)
    is_inside = i < half
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM + i
    first = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if HAS_QK_NORM:
            weight = qk_norm + tl.where(head < HEADS, 0, DIM) + i
            square = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / DIM
            factor = tl.rsqrt(square + eps)
            first *= factor * tl.load(weight, mask=is_inside, other=0.0)
            second *= factor * tl.load(weight + half, mask=is_inside, other=0.0)
        cos = tl.load(cosine + row * half + i, mask=is_inside, other=0.0)
        sin = tl.load(sine + row * half + i, mask=is_inside, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if head < HEADS:
        query = q + (row * HEADS + head) * DIM + i
        tl.store(query, (first * q_factor).to(q.dtype.element_ty), mask=is_inside)
        tl.store(query + half, (second * q_factor).to(q.dtype.element_ty), mask=is_inside)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:  # a row that only fills up a recorded step has none
            is_key = head < HEADS + KV_HEADS
            kv_head = (head - HEADS) % KV_HEADS
            block, token = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
            head_bytes: tl.constexpr = BLOCK_TOKENS * (DIM + (4 if FORMAT else 0))  # elements, where they aren't bytes
            at = (block * KV_HEADS + kv_head) * head_bytes
            if FORMAT:
                largest = tl.maximum(tl.max(tl.abs(first), axis=0), tl.max(tl.abs(second), axis=0))
                step = largest / 127.0 if FORMAT == 1 else largest / LARGEST_FP8
                # a maximum passes over NaN on a device; as a scale it spoils what reads it, as the value would have
                step += tl.sum(first * 0.0 + second * 0.0, axis=0)
                divisor = tl.where(step > 0.0, step, 1.0)
                first, second = first / divisor, second / divisor
                if FORMAT == 1:
                    first, second = rounded(first), rounded(second)
                scale_at = (at + BLOCK_TOKENS * DIM) // 4 + token
                if is_key:
                    tl.store(k_scale + scale_at, step)
                else:
                    tl.store(v_scale + scale_at, step)
            to = at + token * DIM + i
            kept_first = to_fp8(first, k) if FORMAT == 2 else first.to(k.dtype.element_ty)
            kept_second = to_fp8(second, k) if FORMAT == 2 else second.to(k.dtype.element_ty)
            if is_key:
                tl.store(k + to, kept_first, mask=is_inside)
                tl.store(k + to + half, kept_second, mask=is_inside)
            else:
                tl.store(v + to, kept_first, mask=is_inside)
                tl.store(v + to + half, kept_second, mask=is_inside)
