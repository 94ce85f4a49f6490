"""How one KV block lies in the memory of a GPU: [kv_heads][tokens][head_dim], quantized values before their scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.memory.formats import SCALE_BYTES


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A head's tokens one after the other: as blocks travel between processes, unless KV is quantized.

    Quantized: behind each head's values one float32 scale a token, as bytes. The wire has these bytes as ScaledLayout
    keeps them: K in fours of dimensions, V in pairs of tokens.
    """

    tokens: int
    kv_heads: int
    head_dim: int
    is_scaled: bool = False

    @property
    def k_shape(self) -> tuple[int, ...]:
        if self.is_scaled:
            return (self.kv_heads, self.tokens * (self.head_dim + SCALE_BYTES))
        return (self.kv_heads, self.tokens, self.head_dim)

    v_shape = k_shape

    def k_to_wire(self, blocks: Tensor) -> Tensor:
        return self._with_values(blocks, (self.tokens, self.head_dim // 4, 4), (1, 0, 2))

    def v_to_wire(self, blocks: Tensor) -> Tensor:
        return self._with_values(blocks, (self.tokens // 2, 2, self.head_dim), (0, 2, 1))

    def k_from_wire(self, blocks: Tensor) -> Tensor:
        return self._with_values(blocks, (self.head_dim // 4, self.tokens, 4), (1, 0, 2))

    def v_from_wire(self, blocks: Tensor) -> Tensor:
        return self._with_values(blocks, (self.tokens // 2, self.head_dim, 2), (0, 2, 1))

    def _with_values(self, blocks: Tensor, shape: tuple[int, int, int], order: tuple[int, int, int]) -> Tensor:
        """The values of each block and head, of this shape, in another order of its axes; scales stay behind."""
        if not self.is_scaled:
            return blocks
        size = self.tokens * self.head_dim
        values = blocks[..., :size].reshape(*blocks.shape[:-1], *shape)
        lead = values.dim() - 3
        turned = values.permute(*range(lead), *(lead + axis for axis in order)).reshape(*blocks.shape[:-1], size)
        return torch.cat((turned, blocks[..., size:]), dim=-1)
