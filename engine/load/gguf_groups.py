"""GGUF's quantized blocks as integers in groups of 32 columns, without going through floats.

A block of 32 (in K-quants 8 of them share a head, 256 columns) is a float16 step d, in some kinds a least value m, and
codes q: value = d * q + m. That is a group's (code - zero) * scale, with codes of 5 bits kept in bytes of 8. The other
kinds have shorter groups, for which there is no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind

from engine.quant.groups import GroupedWeight

GROUP = 32
_SUPER = 8  # groups of a K-quant's block

Array = np.ndarray[Any, np.dtype[Any]]


class _Blocks(NamedTuple):
    """Codes [groups, 32], step d [groups], least value m [groups] or None where the middle code is zero."""

    codes: Array
    step: Array
    least: Array | None


class Stored(NamedTuple):
    """How a kind is kept: bits of a code, whether groups have zeros of their own, and how its blocks are read."""

    bits: int
    has_zeros: bool
    read: Callable[[Array], _Blocks]


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
        codes = np.where(is_flat[:, None], np.uint8(0), codes)
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


def _nibbles(bytes_: Array) -> Array:
    """[n, 16] -> [n, 32]: the low halves, then the high ones."""
    return np.concatenate((bytes_ & 15, bytes_ >> 4), axis=-1)


def _fifth_bits(words: Array) -> Array:
    """The 32 bits of each [n, 4 bytes] as codes [n, 32] of 0 or 16."""
    return np.unpackbits(np.ascontiguousarray(words), axis=-1, bitorder="little") << 4


def _q8_0(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 34)
    return _Blocks(blocks[:, 2:] ^ 128, _halves(blocks[:, :2])[:, 0], None)  # two's complement to offset 128


def _q4_0(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 18)
    return _Blocks(_nibbles(blocks[:, 2:]), _halves(blocks[:, :2])[:, 0], None)


def _q4_1(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 20)
    heads = _halves(blocks[:, :4])
    return _Blocks(_nibbles(blocks[:, 4:]), heads[:, 0], heads[:, 1])


def _q5_0(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 22)
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Blocks(codes + np.uint8(128 - 16), _halves(blocks[:, :2])[:, 0], None)


def _q5_1(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 24)
    heads = _halves(blocks[:, :4])
    return _Blocks(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), heads[:, 0], heads[:, 1])


def _q4_k(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 144)
    return _Blocks(_k_nibbles(blocks[:, 16:]), *_k_heads(blocks[:, :16]))


def _q5_k(raw: Array) -> _Blocks:
    blocks = raw.reshape(-1, 176)
    # bit i of byte c is the fifth bit of column c of group i
    fifth = (blocks[:, None, 16:48] >> np.arange(_SUPER, dtype=np.uint8)[:, None] & 1) << 4
    return _Blocks(_k_nibbles(blocks[:, 48:]) | fifth.reshape(-1, GROUP), *_k_heads(blocks[:, :16]))


def _k_nibbles(codes: Array) -> Array:
    """[n, 128] -> [8 n, 32]: 32 bytes hold two groups, one in their low halves and one in the high ones."""
    pairs = codes.reshape(-1, _SUPER // 2, 1, GROUP)
    return np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(-1, GROUP)


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
    Kind.Q5_0: Stored(8, False, _q5_0),
    Kind.Q5_1: Stored(8, True, _q5_1),
    Kind.Q5_K: Stored(8, True, _q5_k),
    Kind.Q4_0: Stored(4, False, _q4_0),
    Kind.Q4_1: Stored(4, True, _q4_1),
    Kind.Q4_K: Stored(4, True, _q4_k),
}
"""What can be kept as it is."""
