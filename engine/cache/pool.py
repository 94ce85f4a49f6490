"""The K and V tensors: the only place besides the kernels that knows how KV lies in memory.

In memory, per layer: K and V each [blocks, *block]; the tier of kernels chooses the block's shape (cache/layout.py).

On the wire (`export_blocks`), version 1, little-endian, whatever the layout in memory:
    8 bytes  b"BSKV\\0\\0\\0\\1"
    4 bytes  length of the layout id, then the layout id (UTF-8)
    4 bytes  number of blocks n
    4 bytes  CRC-32 of the payload
    payload  [n][layers][K, V][kv_heads][block_tokens][head_dim]; int8, fp8: each head's bytes as ScaledLayout has them
A pool takes in only bytes whose layout id equals its own.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.cache.layout import Layout
from engine.errors import EngineError
from engine.memory import formats, sizing
from engine.model.config import ModelConfig
from engine.sched.plan import BlockCopy

_MAGIC = b"BSKV\0\0\0\1"
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.int8}  # quantized: bytes


def block_bytes(model: ModelConfig, kv_format: str, block_tokens: int) -> int:
    """Bytes of one block, all layers, K and V, as the memory planner counts them."""
    return sizing.block_bytes(model, formats.kv_format(kv_format), block_tokens)


class KVPool:
    """KV memory for `num_blocks` blocks. The memory is touched only when a block is first written."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        kv_format: str,
        block_tokens: int,
        num_blocks: int,
        layout: Layout,
        device: torch.device | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.layout_id = (
            f"kv1/{kv_format}/layers={model.num_layers}/kv_heads={model.num_kv_heads}"
            f"/head_dim={model.head_dim}/block_tokens={block_tokens}"
        )
        self._layout = layout
        self._k = _zeros((model.num_layers, num_blocks, *layout.k_shape), DTYPES[kv_format], device)
        self._v = _zeros((model.num_layers, num_blocks, *layout.v_shape), DTYPES[kv_format], device)

    @property
    def block_bytes(self) -> int:
        """Of one block, all layers, K and V, in memory as on the wire."""
        return self._k[:, 0].numel() * 2 * self._k.element_size()

    def holds(self, model: ModelConfig, layout: Layout, kv_format: str) -> bool:
        """Whether a block can also hold the KV of another model, in its first layers."""
        k_shape, v_shape = tuple(self._k.shape), tuple(self._v.shape)
        is_same = k_shape[2:] == tuple(layout.k_shape) and v_shape[2:] == tuple(layout.v_shape)
        return is_same and self.layout_id.startswith(f"kv1/{kv_format}/") and model.num_layers <= k_shape[0]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each [blocks, *block]."""
        return self._k[index], self._v[index]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks in all layers, one after the other."""
        for copy in copies:
            assert max(copy.source, copy.target) < self.num_blocks, "a block id lies outside the pool"
            for cache in (self._k, self._v):
                cache[:, copy.target].copy_(cache[:, copy.source])

    def poison(self, blocks: Sequence[int]) -> None:
        """Overwrites blocks with NaN, so that whoever reads them is seen."""
        poison = float("nan") if self._k.is_floating_point() else -1  # all bits set: the scales are NaN
        self._k[:, self._ids(blocks)] = poison
        self._v[:, self._ids(blocks)] = poison

    def export_blocks(self, blocks: Sequence[int]) -> bytes:
        """The contents of `blocks` in the wire layout."""
        ids = self._ids(blocks)
        layers = [
            torch.stack((self._layout.k_to_wire(k[ids]), self._layout.v_to_wire(v[ids])), dim=1)
            for k, v in zip(self._k, self._v, strict=True)
        ]
        payload = torch.stack(layers, dim=1).contiguous().view(torch.uint8).cpu().numpy().tobytes()
        layout = self.layout_id.encode()
        head = struct.pack("<I", len(layout)) + layout + struct.pack("<II", len(ids), zlib.crc32(payload))
        return _MAGIC + head + payload

    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None:
        """Fills `blocks` from the wire layout. Raises EngineError when layout, count or checksum differ."""
        ids = self._ids(blocks)
        payload = self._checked(data, len(ids))
        shape = self._layout.k_to_wire(self._k[0, :1]).shape[1:]
        flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(self._k.dtype).to(self._k.device)
        for index, layer in enumerate(flat.view(len(ids), len(self._k), 2, *shape).unbind(1)):
            self._k[index, ids] = self._layout.k_from_wire(layer[:, 0])
            self._v[index, ids] = self._layout.v_from_wire(layer[:, 1])

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
        size = self.block_bytes * num_blocks
        if len(payload) != size or data[start : start + 8] != struct.pack("<II", num_blocks, zlib.crc32(payload)):
            raise EngineError(f"These KV blocks are damaged, or not {num_blocks} in number.")
        return payload

    def _ids(self, blocks: Sequence[int]) -> Tensor:
        assert all(0 <= block < self.num_blocks for block in blocks), "a block id lies outside the pool"
        return torch.tensor(list(blocks), dtype=torch.int64, device=self._k.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """On the host their pages are handed out at first write; torch.zeros would write, and so occupy, all of them."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # scattered blocks: translating addresses costs as much as reading
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
