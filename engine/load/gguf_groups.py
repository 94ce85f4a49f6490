"""GGUF's quantized blocks as integers in groups of 16 or 32 columns, without going through floats.

A group is a float16 step d, in some kinds a least value m, and codes q: value = d * q + m. In K-quants the groups of
256 columns share d and m, which small integers multiply. That is a group's (code - zero) * scale, with codes of 2 and 3
bits kept in 4, those of 5 and 6 in 8. The other kinds have codes that stand for numbers of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine.quant.groups import GroupedWeight

GROUP = 32
_SHORT = 16

Array = np.ndarray[Any, np.dtype[Any]]


class _Blocks(NamedTuple):
    """Codes of all columns, step d [groups], least value m [groups] or None where the middle code is zero."""

    codes: Array
    step: Array
    least: Array | None


class Stored(NamedTuple):
    """How a kind is kept: bits of a code, whether groups have zeros of their own, how its blocks are read, and columns
    of a group."""

    bits: int
    has_zeros: bool
    read: Callable[[Array], _Blocks]
    group: int = GROUP


def grouped(raw: Array, kind: Kind, rows: int) -> GroupedWeight | None:
    """The bytes of a matrix of `rows` rows; None for a kind that has no such groups, or where a step isn't finite."""
    if kind not in KINDS:
        return None
    stored = KINDS[kind]
    codes, step, least = stored.read(raw)
    if not np.isfinite(step).all() or (least is not None and not np.isfinite(least).all()):
        return None
    zero = None
    if least is not None:
        # a step of zero says that all of a group is `least`
        is_flat = step == 0
        codes = np.where(is_flat[:, None], np.uint8(0), codes.reshape(-1, stored.group))
        scale = np.where(is_flat, np.where(least == 0, 1, least), step)
        zero = torch.from_numpy(np.where(is_flat, np.where(least == 0, 0, -1), -least / scale).astype(np.float32))
        step = scale
    return GroupedWeight(
        bits=stored.bits,
        codes=torch.from_numpy(codes.reshape(rows, -1)),
        scale=torch.from_numpy(step.astype(np.float32).reshape(rows, -1)),
        zero=None if zero is None else zero.view(rows, -1),
    )


def _halves(blocks: Array) -> Array:
    """float16 [n, 2k bytes] as float32 [n, k]."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _codes(bytes_: Array, bits: int, run: int) -> Array:
    """[n, bytes] -> [n, codes]: each `run` bytes hold as many codes in their lowest bits, then as many in the next."""
    runs = bytes_.reshape(len(bytes_), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (runs >> shifts & (1 << bits) - 1).reshape(len(bytes_), -1)


def _fifth_bits(words: Array) -> Array:
    """The 32 bits of each [n, 4 bytes] as codes [n, 32] of 0 or 16."""
    return np.unpackbits(np.ascontiguousarray(words), axis=-1, bitorder="little") << 4


def _q8_0(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 34)
    return _Blocks(blocks[:, 2:] ^ 128, _halves(blocks[:, :2])[:, 0], None)  # two's complement to offset 128


def _q4_0(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 18)
    return _Blocks(_codes(blocks[:, 2:], 4, 16), _halves(blocks[:, :2])[:, 0], None)


def _q4_1(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 20)
    heads = _halves(blocks[:, :4])
    return _Blocks(_codes(blocks[:, 4:], 4, 16), heads[:, 0], heads[:, 1])


def _q5_0(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 22)
    codes = _codes(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6])
    return _Blocks(codes + np.uint8(128 - 16), _halves(blocks[:, :2])[:, 0], None)


def _q5_1(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 24)
    heads = _halves(blocks[:, :4])
    return _Blocks(_codes(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8]), heads[:, 0], heads[:, 1])


def _q2_k(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 84)
    both, packed = _halves(blocks[:, 80:]), blocks[:, :16]
    steps, leasts = both[:, :1] * (packed & 15), -both[:, 1:] * (packed >> 4)
    return _Blocks(_codes(blocks[:, 16:80], 2, 32), steps.reshape(-1), leasts.reshape(-1))


def _q3_k(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 110)
    codes = _codes(blocks[:, 32:96], 2, 32) | _codes(blocks[:, :32], 1, 32) << 2
    packed = _codes(blocks[:, 96:104], 4, 8) | _codes(blocks[:, 104:108], 2, 4) << 4
    steps = _halves(blocks[:, 108:]) * (packed.astype(np.int8) - 32)
    return _Blocks(codes + np.uint8(8 - 4), steps.reshape(-1), None)


def _q4_k(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 144)
    return _Blocks(_codes(blocks[:, 16:], 4, 32), *_k_heads(blocks[:, :16]))


def _q5_k(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 176)
    codes = _codes(blocks[:, 48:], 4, 32) | _codes(blocks[:, 16:48], 1, 32) << 4
    return _Blocks(codes, *_k_heads(blocks[:, :16]))


def _q6_k(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 210)
    codes = _codes(blocks[:, :128], 4, 64) | _codes(blocks[:, 128:192], 2, 32) << 4
    steps = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)
    return _Blocks(codes + np.uint8(128 - 32), steps.reshape(-1), None)


def _k_heads(heads: Array) -> tuple[Array, Array]:
    """Steps and least values of eight groups from [n, 16]: two float16 that are multiplied by 6 bits for each group,
    of which the last four groups have theirs in pieces."""
    both, packed = _halves(heads[:, :4]), heads[:, 4:]
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    steps = np.concatenate((low & 63, rest & 15 | low >> 6 << 4), axis=1)
    leasts = np.concatenate((high & 63, rest >> 4 | high >> 6 << 4), axis=1)
    return (both[:, :1] * steps).reshape(-1), (-both[:, 1:] * leasts).reshape(-1)


KINDS = {
    Kind.Q8_0: Stored(8, False, _q8_0),
    Kind.Q6_K: Stored(8, False, _q6_k, _SHORT),
    Kind.Q5_0: Stored(8, False, _q5_0),
    Kind.Q5_1: Stored(8, True, _q5_1),
    Kind.Q5_K: Stored(8, True, _q5_k),
    Kind.Q4_0: Stored(4, False, _q4_0),
    Kind.Q4_1: Stored(4, True, _q4_1),
    Kind.Q4_K: Stored(4, True, _q4_k),
    Kind.Q3_K: Stored(4, False, _q3_k, _SHORT),
    Kind.Q2_K: Stored(4, True, _q2_k, _SHORT),
}
"""What can be kept as it is."""
