"""The K and V tensors: the only place besides the kernels that knows how KV lies in memory.

In memory, per layer: K and V each [slots, kv_heads, head_dim], slot = block * block_tokens + offset. One block past
the last is never handed out and always zero; gathers read padding from it (`zero_slot`).

On the wire (`export_blocks`), version 1, little-endian:
    8 bytes  b"BSKV\\0\\0\\0\\1"
    4 bytes  length of the layout id, then the layout id (UTF-8)
    4 bytes  number of blocks n
    4 bytes  CRC-32 of the payload
    payload  [n][layers][K, V][kv_heads][block_tokens][head_dim]
A pool takes in only bytes whose layout id equals its own.
"""

from __future__ import annotations

import math
import mmap
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.model.config import ModelConfig
from engine.sched.plan import BlockCopy

_MAGIC = b"BSKV\0\0\0\1"
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def block_bytes(model: ModelConfig, kv_format: str, block_tokens: int) -> int:
    """Bytes of one block, all layers, K and V."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * DTYPES[kv_format].itemsize
    return per_token * block_tokens


class KVPool:
    """KV memory for `num_blocks` blocks. The memory is touched only when a block is first written."""

    def __init__(self, model: ModelConfig, *, kv_format: str, block_tokens: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.zero_slot = num_blocks * block_tokens
        self.layout_id = (
            f"kv1/{kv_format}/layers={model.num_layers}/kv_heads={model.num_kv_heads}"
            f"/head_dim={model.head_dim}/block_tokens={block_tokens}"
        )
        shape = (model.num_layers, num_blocks + 1, block_tokens, model.num_kv_heads, model.head_dim)
        self._k = _lazy_zeros(shape, DTYPES[kv_format])
        self._v = _lazy_zeros(shape, DTYPES[kv_format])
        self.slot_bytes = model.num_kv_heads * model.head_dim * DTYPES[kv_format].itemsize

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as views [slots, kv_heads, head_dim]."""
        return self._k[index].flatten(0, 1), self._v[index].flatten(0, 1)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks in all layers, one after the other."""
        for copy in copies:
            assert max(copy.source, copy.target) < self.num_blocks, "a block id lies outside the pool"
            for cache in (self._k, self._v):
                cache[:, copy.target].copy_(cache[:, copy.source])

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks with NaN, so that whoever reads them is seen."""
        self._k[:, self._ids(blocks)] = float("nan")
        self._v[:, self._ids(blocks)] = float("nan")

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """The contents of `blocks` in the wire layout."""
        ids = self._ids(blocks)
        both = torch.stack((self._k[:, ids], self._v[:, ids]))  # [K V, layers, n, tokens, heads, dim]
        payload = both.permute(2, 1, 0, 4, 3, 5).contiguous().view(torch.uint8).numpy().tobytes()
        layout = self.layout_id.encode()
        head = struct.pack("<I", len(layout)) + layout + struct.pack("<II", len(ids), zlib.crc32(payload))
        return _MAGIC + head + payload

    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        """Fills `blocks` from the wire layout. Raises EngineError when layout, count or checksum differ."""
        ids = self._ids(blocks)
        payload = self._checked(data, len(ids))
        layers, _, tokens, heads, dim = self._k.shape
        flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(self._k.dtype)
        both = flat.view(len(ids), layers, 2, heads, tokens, dim).permute(2, 1, 0, 4, 3, 5)
        self._k[:, ids] = both[0]
        self._v[:, ids] = both[1]

    def _checked(self, data: bytes, num_blocks: int) -> bytes:
        layout = self.layout_id.encode()
        start = len(_MAGIC) + 4
        if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != struct.pack("<I", len(layout)):
            raise EngineError(f"These KV blocks don't have the layout {self.layout_id}.")
        if data[start : start + len(layout)] != layout:
            found = data[start : start + len(layout)].decode(errors="replace")
            raise EngineError(f"These KV blocks have the layout {found}, expected {self.layout_id}.")
        start += len(layout)
        payload = data[start + 8 :]
        size = self._k[:, 0].numel() * 2 * self._k.element_size() * num_blocks
        if len(payload) != size or data[start : start + 8] != struct.pack("<II", num_blocks, zlib.crc32(payload)):
            raise EngineError(f"These KV blocks are damaged, or not {num_blocks} in number.")
        return payload

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        assert all(0 <= block < self.num_blocks for block in blocks), "a block id lies outside the pool"
        return torch.tensor(list(blocks), dtype=torch.int64)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system hands out at first write; torch.zeros would write, and so occupy, all of them."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
