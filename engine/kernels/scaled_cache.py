"""KV of 8 bits in plain torch: each token and head as int8 or e4m3 numbers with one float32 scale behind them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.memory.formats import SCALE_BYTES
from engine.quant.fp8 import DTYPE, LARGEST, encode

KINDS = {"int8": torch.int8, "fp8": DTYPE}
"""The formats of KV that have scales, and what their numbers are."""

_LARGEST = {torch.int8: 127.0, DTYPE: LARGEST}


def write(x: Tensor, cache: Tensor, slots: Tensor, kind: torch.dtype) -> None:
    """Puts x [T, kv_heads, dim] float32 into rows `slots` [T] of cache [slots, kv_heads, dim + 4 bytes]. A head that
    isn't finite gets a NaN scale."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest.isfinite(), largest / _LARGEST[kind], float("nan"))
    divisor = torch.where(scale > 0, scale, 1.0)
    sound = torch.where(scale.isfinite(), x, 0.0)
    values = encode(sound, divisor) if kind == DTYPE else (sound / divisor).round().to(torch.int8)
    row = torch.cat((values.view(torch.int8), scale.view(torch.int8)), dim=-1)
    cache.index_copy_(0, slots, row)


def read(rows: Tensor, kind: torch.dtype) -> Tensor:
    """rows [..., dim + 4 bytes] of a cache as the numbers they stand for, float32 [..., dim]."""
    values = rows[..., :-SCALE_BYTES].contiguous().view(kind).float()
    return values * rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
