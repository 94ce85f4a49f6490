"""Paged attention: pieces of rows by runs of keys, each by itself, and the exact merge of what they leave.

A piece is a run of query rows that walk one block table together, over keys [begin, end): the decodes and prefills of
a step, groups that share a prefix, and the splits of long sequences are all pieces (pieces.py). The query heads of one
kv head are rows of a piece's tile, so each key is read once for all of them. A piece that holds all keys of its rows
writes their output; else it leaves its unnormalized output, the largest score and the sum of weights, and `merge` adds
up those of each row. Scores are powers of two: q was multiplied by log2 e.

The split of a softmax over keys follows Milakov and Gimelshein (1805.02867) and FlashDecoding.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from engine.kernels.gpu.common import dot

TILE_ROWS = (16, 64)
"""Query rows of a tile: of a few decodes, and of prefills and groups."""


class Walk(NamedTuple):
    """How a tile goes along its keys: so many at a time, by so many warps, so many loads ahead."""

    keys: int
    warps: int
    stages: int


def walk_of(rows: int, dim: int) -> Walk:
    """Of a tile of `rows` query rows: scores and output fit the registers. Three stages: keys wait for their block."""
    return Walk(64, 4, 3) if dim <= 128 else Walk(32, max(4, rows // 8), 3)


@triton.jit(do_not_specialize=["window"])
def attend(
    q, k, v, k_scale, v_scale, lengths, tables, pieces, out, partial, state, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    """Program (piece, kv head). pieces int32 [n, 6]: first row, rows, first key, end of keys, offset in tables, slot of
    its first row in `partial` or -1. partial float32 [slots, HEADS, DIM], state [slots, HEADS, 2]. A row sees its last
    `window` keys, its own included; all, where that is 0."""
    head_size: tl.constexpr = BLOCK_TOKENS * (DIM + (4 if IS_SCALED else 0))
    group: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    piece = pieces + tl.program_id(0) * 6
    first, rows = tl.load(piece), tl.load(piece + 1)
    begin, end = tl.load(piece + 2), tl.load(piece + 3)
    table, slot = tables + tl.load(piece + 4), tl.load(piece + 5)

    m, d = tl.arange(0, ROWS), tl.arange(0, DIM_SIZE)
    is_row, is_dim = m < rows * group, d < DIM
    row, head = (first + m // group).to(tl.int64), kv_head * group + m % group
    at = (row * HEADS + head)[:, None] * DIM + d[None, :]
    is_cell = is_row[:, None] & is_dim[None, :]
    queries = tl.load(q + at, mask=is_cell, other=0.0)
    length = tl.load(lengths + row, mask=is_row, other=0)
    seen = tl.minimum(length, end)  # keys before this one
    last = tl.max(seen, axis=0)
    low = tl.where(window > 0, length - window, 0)
    low = tl.where(is_row, tl.maximum(low, begin), 2147483647)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIM_SIZE), tl.float32)
    for start in range(tl.min(low, axis=0), last, KEYS):
        n = start + tl.arange(0, KEYS)
        is_key = n < last
        block = tl.load(table + n // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        base = (block * KV_HEADS + kv_head) * head_size
        cell = base + n % BLOCK_TOKENS * DIM
        keys = tl.load(k + cell[None, :] + d[:, None], mask=is_dim[:, None] & is_key[None, :], other=0.0)
        score = dot(queries, keys.to(queries.dtype), tl.zeros((ROWS, KEYS), tl.float32))
        scale_at = (base + BLOCK_TOKENS * DIM) // 4 + n % BLOCK_TOKENS
        if IS_SCALED:
            score *= tl.load(k_scale + scale_at, mask=is_key, other=0.0)[None, :]
        is_seen = (n[None, :] < seen[:, None]) & (n[None, :] >= low[:, None])
        score = tl.where(is_seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see none of these keys
        weight = tl.exp2(score - origin[:, None])
        keep = tl.exp2(top - origin)
        total = total * keep + tl.sum(weight, axis=1)
        if IS_SCALED:
            weight *= tl.load(v_scale + scale_at, mask=is_key, other=0.0)[None, :]
        values = tl.load(v + cell[:, None] + d[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        mixed = dot(weight.to(queries.dtype), values.to(queries.dtype), mixed * keep[:, None])
        top = higher
    if slot < 0:
        tl.store(out + at, mixed / total[:, None], mask=is_cell)
    else:
        place = (slot + m // group).to(tl.int64) * HEADS + head
        tl.store(partial + place[:, None] * DIM + d[None, :], mixed, mask=is_cell)
        tl.store(state + place * 2, top, mask=is_row)
        tl.store(state + place * 2 + 1, total, mask=is_row)


@triton.jit
def merge(partial, state, slots, slot_ends, out, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_SIZE: tl.constexpr):
    """Program (row, head): what the pieces of row left in slots[slot_ends[row - 1]:slot_ends[row]], as out. A row
    without any was written by its one piece."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(slot_ends + row - 1, mask=row > 0, other=0)
    end = tl.load(slot_ends + row)
    if begin == end:
        return
    d = tl.arange(0, DIM_SIZE)
    top = tl.full((), float("-inf"), tl.float32)
    for i in range(begin, end):
        place = tl.load(slots + i).to(tl.int64) * HEADS + head
        top = tl.maximum(top, tl.load(state + place * 2))
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((DIM_SIZE,), tl.float32)
    for i in range(begin, end):
        place = tl.load(slots + i).to(tl.int64) * HEADS + head
        share = tl.exp2(tl.load(state + place * 2) - top)
        total += tl.load(state + place * 2 + 1) * share
        mixed += tl.load(partial + place * DIM + d, mask=d < DIM, other=0.0) * share
    tl.store(out + (row.to(tl.int64) * HEADS + head) * DIM + d, mixed / total, mask=d < DIM)
