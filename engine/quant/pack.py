"""Codes of 4 or 8 bits as 32-bit words, in the bit orders of public checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's kernels want the even columns of eight in the low half of a word, the odd ones in the high half."""


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """codes uint8 [rows, columns] -> int32 [rows, words], the first code in the lowest bits; a last word that isn't
    full ends in zeros. `order[i]` is the code of each eight that place i of a word holds (4 bits only)."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    places = codes.reshape(len(codes), -1, each).to(torch.int32)
    if order != IN_ORDER:
        places = places[..., list(order)]
    return (places << _shifts(bits)).sum(-1, dtype=torch.int32)


def unpack_words(words: Tensor, bits: int, columns: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """The inverse: int32 [rows, words] -> uint8 [rows, columns]."""
    places = (words[..., None] >> _shifts(bits)) & ((1 << bits) - 1)
    if order != IN_ORDER:
        places = places[..., [order.index(code) for code in range(len(order))]]
    return places.flatten(1)[:, :columns].to(torch.uint8)


def pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [rows, columns] as our own kernels read them: two of 4 bits in a byte, the even column low."""
    if bits == 8:
        return codes.contiguous()
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_bytes(packed: Tensor, bits: int) -> Tensor:
    """The inverse."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _shifts(bits: int) -> Tensor:
    return torch.arange(0, 32, bits, dtype=torch.int32)
