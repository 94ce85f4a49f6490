"""Logits to token ids on the device, without a word to the host: the best id of each row, or one drawn.

A draw keeps tokens of at least `min_p` of the largest probability, of these the `top_k` largest, of these the fewest
that hold `top_p` of the mass; ties at a threshold stay. Thresholds are found by bisection over the float32 bit
patterns, which order as the numbers do, so they are exact and nothing is sorted. The token is where the cumulative sum
of what is kept, in order of ids, passes the row's draw (sample/random.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 2048
"""Logits that a program looks at together."""


@triton.jit
def ordered(x):
    """float32 -> int32 that order alike."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def best_rows(logits, masks, ids, width, num_masked, words, SIZE: tl.constexpr):
    """The first of the largest logits of each row that its mask allows; -1 where a value isn't finite or none may come.
    masks int32 [num_masked, words] of the first rows: bit c, in little-endian words."""
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * width
    top = float("-inf")
    best = -1
    bad = 0.0
    for start in range(0, width, SIZE):
        n = start + tl.arange(0, SIZE)
        x = tl.load(source + n, mask=n < width, other=0.0).to(tl.float32)
        bad += tl.sum(x * 0.0, axis=0)
        may_come = n < width
        if row < num_masked:
            word = tl.load(masks + row.to(tl.int64) * words + n // 32, mask=n < words * 32, other=0)
            may_come = may_come & (((word >> (n % 32)) & 1) != 0)
        x = tl.where(may_come, x, float("-inf"))
        highest, where = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(highest > top, start + where, best)
        top = tl.maximum(top, highest)
    tl.store(ids + row, tl.where(bad == 0.0, best, -1).to(tl.int64))


@triton.jit
def mass_above(source, width, least, top, temperature, SIZE: tl.constexpr):
    """How many values order at `least` or above, and the sum of their exp((x - top) / temperature)."""
    count = 0
    mass = 0.0
    for start in range(0, width, SIZE):
        n = start + tl.arange(0, SIZE)
        x = tl.load(source + n, mask=n < width, other=float("-inf")).to(tl.float32)
        is_kept = (ordered(x) >= least) & (n < width)
        count += tl.sum(is_kept.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(is_kept, tl.exp((x - top) / temperature), 0.0), axis=0)
    return count, mass


@triton.jit
def sample_rows(logits, ids, temperatures, top_ks, top_ps, min_ps, draws, width, SIZE: tl.constexpr):
    """logits float32 [rows, width] -> ids int64 [rows]; -1 where a value is NaN or +infinity, or all are -infinity."""
    row = tl.program_id(0)
    source = logits + row.to(tl.int64) * width
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, min_p = tl.load(top_ps + row), tl.load(min_ps + row)
    top = float("-inf")
    bad = 0.0
    for start in range(0, width, SIZE):
        n = start + tl.arange(0, SIZE)
        x = tl.load(source + n, mask=n < width, other=float("-inf")).to(tl.float32)
        bad += tl.sum(tl.where(x == float("-inf"), 0.0, x * 0.0), axis=0)
        top = tl.maximum(top, tl.max(x, axis=0))
    if (bad != 0.0) | (top == float("-inf")):
        tl.store(ids + row, tl.full((), -1, tl.int64))
        return
    lowest = ordered(top + tl.log(tl.maximum(min_p, 1e-38)) * temperature) if min_p > 0.0 else -2147483647
    if top_k > 0:
        lowest = tl.maximum(lowest, kth(source, width, top_k, lowest, ordered(top), top, temperature, SIZE))
    _, mass = mass_above(source, width, lowest, top, temperature, SIZE)
    if top_p < 1.0:
        lowest = nucleus(source, width, top_p * mass, lowest, ordered(top), top, temperature, SIZE)
        _, mass = mass_above(source, width, lowest, top, temperature, SIZE)
    target = tl.load(draws + row) * mass
    before = 0.0
    chosen = -1
    last = -1
    for start in range(0, width, SIZE):
        n = start + tl.arange(0, SIZE)
        x = tl.load(source + n, mask=n < width, other=float("-inf")).to(tl.float32)
        is_kept = (ordered(x) >= lowest) & (n < width)
        share = tl.where(is_kept, tl.exp((x - top) / temperature), 0.0)
        passed = (before + tl.cumsum(share, axis=0) > target) & (share > 0.0)
        here = tl.min(tl.where(passed, n, 2147483647), axis=0)
        chosen = tl.where((chosen < 0) & (here < 2147483647), here, chosen)
        last = tl.maximum(last, tl.max(tl.where(share > 0.0, n, -1), axis=0))
        before += tl.sum(share, axis=0)
    tl.store(ids + row, tl.where(chosen < 0, last, chosen).to(tl.int64))  # rounding may leave the target unpassed


@triton.jit
def kth(source, width, count, low, high, top, temperature, SIZE: tl.constexpr):
    """The largest threshold in [low, high] that at least `count` values reach, or low."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        found, _ = mass_above(source, width, middle, top, temperature, SIZE)
        low, high = tl.where(found >= count, middle, low), tl.where(found >= count, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def nucleus(source, width, mass, low, high, top, temperature, SIZE: tl.constexpr):
    """The largest threshold in [low, high] above which at least `mass` lies, or low."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        _, found = mass_above(source, width, middle, top, temperature, SIZE)
        low, high = tl.where(found >= mass, middle, low), tl.where(found >= mass, high, middle - 1)
    return low.to(tl.int32)
