"""How one KV block lies in memory; a tier of kernels picks the one it reads fastest.

Between processes blocks travel as [kv_heads][block_tokens][head_dim]; each layout converts to and from that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.memory.formats import SCALE_BYTES


class Layout(Protocol):
    """The shapes of one block of keys and of values, and their way to and from [n, kv_heads, tokens, head_dim]."""

    @property
    def k_shape(self) -> tuple[int, ...]: ...
    @property
    def v_shape(self) -> tuple[int, ...]: ...
    def k_to_wire(self, blocks: Tensor) -> Tensor: ...
    def v_to_wire(self, blocks: Tensor) -> Tensor: ...
    def k_from_wire(self, blocks: Tensor) -> Tensor: ...
    def v_from_wire(self, blocks: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """[tokens][kv_heads][head_dim]: a token's row is in one place."""

    tokens: int
    kv_heads: int
    head_dim: int

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (self.tokens, self.kv_heads, self.head_dim)

    v_shape = k_shape

    def k_to_wire(self, blocks: Tensor) -> Tensor:
        return blocks.transpose(1, 2)

    v_to_wire = k_from_wire = v_from_wire = k_to_wire


@dataclass(frozen=True, slots=True)
class ScaledLayout:
    """int8 or fp8, and behind each head's values one float32 scale a token, as bytes.

    K [kv_heads][head_dim / 4][tokens][4], V as in PairLayout. It travels between processes as it lies.
    """

    tokens: int
    kv_heads: int
    head_dim: int

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (self.kv_heads, self.tokens * (self.head_dim + SCALE_BYTES))

    v_shape = k_shape

    def k_to_wire(self, blocks: Tensor) -> Tensor:
        return blocks

    v_to_wire = k_from_wire = v_from_wire = k_to_wire


@dataclass(frozen=True, slots=True)
class ScaledTokenLayout:
    """int8 or fp8, each token and head with its float32 scale behind its values, as bytes: a token's row is in one
    place. The wire has them as ScaledLayout keeps them: K in fours of dimensions, V in pairs of tokens."""

    tokens: int
    kv_heads: int
    head_dim: int

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (self.tokens, self.kv_heads, self.head_dim + SCALE_BYTES)

    v_shape = k_shape

    def k_to_wire(self, blocks: Tensor) -> Tensor:
        values, scales = self._split(blocks)
        fours = values.reshape(-1, self.kv_heads, self.tokens, self.head_dim // 4, 4).transpose(2, 3)
        return torch.cat((fours.flatten(2), scales), dim=2)

    def v_to_wire(self, blocks: Tensor) -> Tensor:
        values, scales = self._split(blocks)
        pairs = values.reshape(-1, self.kv_heads, self.tokens // 2, 2, self.head_dim).transpose(3, 4)
        return torch.cat((pairs.flatten(2), scales), dim=2)

    def k_from_wire(self, blocks: Tensor) -> Tensor:
        fours = self._values(blocks).reshape(-1, self.kv_heads, self.head_dim // 4, self.tokens, 4)
        return self._joined(fours.transpose(2, 3).flatten(3), blocks)

    def v_from_wire(self, blocks: Tensor) -> Tensor:
        pairs = self._values(blocks).reshape(-1, self.kv_heads, self.tokens // 2, self.head_dim, 2)
        return self._joined(pairs.transpose(3, 4).flatten(2, 3), blocks)

    def _split(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """[n, tokens, kv_heads, bytes] as values [n, kv_heads, tokens, head_dim] and scales [n, kv_heads, bytes]."""
        heads = blocks.transpose(1, 2)
        return heads[..., : self.head_dim], heads[..., self.head_dim :].flatten(2)

    def _values(self, blocks: Tensor) -> Tensor:
        """Those of a head on the wire, without its scales."""
        return blocks[:, :, : self.tokens * self.head_dim]

    def _joined(self, values: Tensor, blocks: Tensor) -> Tensor:
        scales = blocks[:, :, self.tokens * self.head_dim :].reshape(-1, self.kv_heads, self.tokens, SCALE_BYTES)
        return torch.cat((values, scales), dim=3).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class PairLayout:
    """For dot products of bf16 pairs: K [kv_heads][head_dim / 2][tokens][2], V [kv_heads][tokens / 2][head_dim][2]."""

    tokens: int
    kv_heads: int
    head_dim: int

    @property
    def k_shape(self) -> tuple[int, ...]:
        return (self.kv_heads, self.head_dim // 2, self.tokens, 2)

    @property
    def v_shape(self) -> tuple[int, ...]:
        return (self.kv_heads, self.tokens // 2, self.head_dim, 2)

    def k_to_wire(self, blocks: Tensor) -> Tensor:
        return blocks.transpose(2, 3).reshape(-1, self.kv_heads, self.tokens, self.head_dim)

    def v_to_wire(self, blocks: Tensor) -> Tensor:
        return blocks.transpose(3, 4).reshape(-1, self.kv_heads, self.tokens, self.head_dim)

    def k_from_wire(self, blocks: Tensor) -> Tensor:
        return blocks.view(-1, self.kv_heads, self.tokens, self.head_dim // 2, 2).transpose(2, 3)

    def v_from_wire(self, blocks: Tensor) -> Tensor:
        return blocks.view(-1, self.kv_heads, self.tokens // 2, 2, self.head_dim).transpose(3, 4)
