"""Logits to token ids on the device, without a word to the host: the best id of each row, or one drawn.

A draw keeps tokens of at least `min_p` of the largest probability, of these the `top_k` largest, of these the fewest
that hold `top_p` of the mass; ties at a threshold stay. Thresholds are found by bisection over the float32 bit
patterns, which order as the numbers do, so they are exact and nothing is sorted. The token is where the cumulative sum
of what is kept, in order of ids, passes the row's draw (sample/random.py).

Masks are int32 [num_masked, words], of the first rows: bit c, in little-endian words, says that column c may come.
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
def masked(x, mask, n, words):
    """Logits x of the columns n, -inf where the mask of so many words doesn't allow them; 0 words: all may come."""
    if words > 0:
        word = tl.load(mask + n // 32, mask=n < words * 32, other=0)
        x = tl.where(((word >> (n % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit(do_not_specialize=["num_masked", "words"])
def best_rows(logits, masks, ids, width, num_masked, words, SIZE: tl.constexpr):
    """The first of the largest logits of each row that its mask allows; -1 where a value isn't finite or none may
    come."""
    row = tl.program_id(0)
    source, mask = logits + row.to(tl.int64) * width, masks + row.to(tl.int64) * words
    words = tl.where(row < num_masked, words, 0)
    top = tl.full((), float("-inf"), tl.float32)
    best = -1
    bad = 0.0
    for start in range(0, width, SIZE):
        n = start + tl.arange(0, SIZE)
        x = tl.load(source + n, mask=n < width, other=0.0).to(tl.float32)
        bad += tl.sum(x * 0.0, axis=0)
        x = masked(tl.where(n < width, x, float("-inf")), mask, n, words)
        highest, where = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(highest > top, start + where, best)
        top = tl.maximum(top, highest)
    tl.store(ids + row, tl.where(bad == 0.0, best, -1).to(tl.int64))


@triton.jit
def candidates(source, mask, n, width, words):
    x = tl.load(source + n, mask=n < width, other=float("-inf")).to(tl.float32)
    return masked(x, mask, n, words)


@triton.jit
def mass_above(source, mask, width, words, least, top, temperature, SIZE: tl.constexpr):
    """How many values order at `least` or above, and the sum of their exp((x - top) / temperature)."""
    count = 0
    mass = 0.0
    for start in range(0, width, SIZE):
        n = start + tl.arange(0, SIZE)
        x = candidates(source, mask, n, width, words)
        is_kept = (ordered(x) >= least) & (n < width)
        count += tl.sum(is_kept.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(is_kept, tl.exp((x - top) / temperature), 0.0), axis=0)
    return count, mass


@triton.jit
def threshold(
    source, mask, width, words, wanted, low, high, top, temperature, BY_MASS: tl.constexpr, SIZE: tl.constexpr
):
    """The largest number in [low, high] at or above which so many values order, or such a mass of them lies; or low."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        count, mass = mass_above(source, mask, width, words, middle, top, temperature, SIZE)
        is_enough = mass >= wanted if BY_MASS else count >= wanted
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["num_masked", "words"])
def sample_rows(logits, masks, ids, numbers, top_ks, width, num_masked, words, SIZE: tl.constexpr):
    """logits float32 [rows, width] -> ids int64 [rows]; -1 where a value is NaN or +infinity, or none may come.
    numbers float32 [rows, 4]: temperature, top_p, min_p, draw."""
    row = tl.program_id(0)
    source, mask = logits + row.to(tl.int64) * width, masks + row.to(tl.int64) * words
    words = tl.where(row < num_masked, words, 0)
    temperature, top_p = tl.load(numbers + row * 4), tl.load(numbers + row * 4 + 1)
    min_p, draw = tl.load(numbers + row * 4 + 2), tl.load(numbers + row * 4 + 3)
    top_k = tl.load(top_ks + row)
    top = tl.full((), float("-inf"), tl.float32)
    bad = 0.0
    for start in range(0, width, SIZE):
        n = start + tl.arange(0, SIZE)
        x = tl.load(source + n, mask=n < width, other=float("-inf")).to(tl.float32)
        bad += tl.sum(tl.where(x == float("-inf"), 0.0, x * 0.0), axis=0)
        top = tl.maximum(top, tl.max(masked(x, mask, n, words), axis=0))
    if (bad != 0.0) | (top == float("-inf")):
        tl.store(ids + row, tl.full((), -1, tl.int64))
        return
    highest = ordered(top)
    likely = ordered(top + tl.log(tl.maximum(min_p, 1e-37)) * temperature)
    lowest = tl.where(min_p > 0.0, likely, -2147483647)
    if top_k > 0:
        by_count = threshold(source, mask, width, words, top_k, lowest, highest, top, temperature, False, SIZE)
        lowest = tl.maximum(lowest, by_count)
    _, mass = mass_above(source, mask, width, words, lowest, top, temperature, SIZE)
    if top_p < 1.0:
        wanted = top_p * mass
        lowest = threshold(source, mask, width, words, wanted, lowest, highest, top, temperature, True, SIZE)
        _, mass = mass_above(source, mask, width, words, lowest, top, temperature, SIZE)
    target = draw * mass
    before = 0.0
    chosen = -1
    last = -1
    for start in range(0, width, SIZE):
        n = start + tl.arange(0, SIZE)
        x = candidates(source, mask, n, width, words)
        is_kept = (ordered(x) >= lowest) & (n < width)
        share = tl.where(is_kept, tl.exp((x - top) / temperature), 0.0)
        passed = (before + tl.cumsum(share, axis=0) > target) & (share > 0.0)
        here = tl.min(tl.where(passed, n, 2147483647), axis=0)
        chosen = tl.where((chosen < 0) & (here < 2147483647), here, chosen)
        last = tl.maximum(last, tl.max(tl.where(share > 0.0, n, -1), axis=0))
        before += tl.sum(share, axis=0)
    tl.store(ids + row, tl.where(chosen < 0, last, chosen).to(tl.int64))  # rounding may leave the target unpassed
