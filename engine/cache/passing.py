"""Cached prefixes as bytes: what one engine computed, another one takes in, block by block under the same keys.

A block is wanted where its key is missing, and only then does it travel. What arrives is cached like anything else: a
request that comes behind it finds it as a hit, and if it was evicted meanwhile, computes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.cache.tables import BlockTables


class BlockBytes(Protocol):
    """The KV pool, as far as passing goes."""

    @property
    def layout_id(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    def export_blocks(self, blocks: Sequence[int]) -> bytes: ...
    def import_blocks(self, blocks: Sequence[int], data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """What the numbers in a block mean, beside its tokens: engines pass blocks on only where all of it is equal.

    `layout` names the KV format too; `model` and `weights` are digest and format of the model's weights. Kernels are no
    part of it: hosts may differ, and then their blocks differ as rounding does.
    """

    layout: str
    model: str
    weights: str

    def difference(self, other: Origin) -> str | None:
        """Why blocks of `other` can't be taken, in a sentence; None if they can."""
        for name, mine, theirs in (
            ("model", self.model, other.model),
            ("weight format", self.weights, other.weights),
            ("KV layout", self.layout, other.layout),
        ):
            if mine != theirs:
                return f"Its {name} is {theirs or 'unnamed'}, and ours {mine or 'unnamed'}: KV blocks can't be shared."
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The beginning of a sequence in whole blocks, and whose cache it belongs to."""

    token_ids: Sequence[int]
    salt: str = ""
    adapter: str = ""


class Passing:
    """The prefix cache of one engine. On the thread that steps it, between steps."""

    def __init__(self, tables: BlockTables, pool: BlockBytes, origin: Origin) -> None:
        self.origin = origin
        self.block_tokens = tables.block_tokens
        self.block_bytes = pool.block_bytes
        self._tables = tables
        self._pool = pool

    @property
    def num_available(self) -> int:
        """Blocks that nobody holds."""
        return self._tables.pool.num_available

    @property
    def num_blocks(self) -> int:
        return self._tables.pool.num_blocks

    def whole_blocks(self, token_ids: Sequence[int]) -> int:
        """How many tokens of a sequence fill blocks."""
        return len(token_ids) // self.block_tokens * self.block_tokens

    def keys(self, prefix: Prefix) -> list[bytes]:
        """Of all its blocks, cached or not."""
        return self._tables.prefix_keys(prefix.token_ids, salt=prefix.salt, adapter=prefix.adapter)

    def num_cached(self, prefix: Prefix) -> int:
        """Blocks that are cached, from its beginning on."""
        return len(self._tables.cached(prefix.token_ids, salt=prefix.salt, adapter=prefix.adapter))

    def export(self, prefix: Prefix, depths: range) -> tuple[range, bytes]:
        """Its blocks at `depths` in the pool's wire layout, as far as they are still cached."""
        chain = self._tables.cached(prefix.token_ids, salt=prefix.salt, adapter=prefix.adapter)
        found = range(depths.start, max(depths.start, min(depths.stop, len(chain))))
        return found, self._pool.export_blocks([chain[depth].block for depth in found]) if found else b""

    def adopt(self, prefix: Prefix, depths: range, data: bytes) -> int:
        """Caches blocks that another engine exported. Returns how many are new here; raises EngineError for bytes in
        another layout, or damaged ones."""
        return self._tables.adopt(
            prefix.token_ids,
            depths,
            salt=prefix.salt,
            adapter=prefix.adapter,
            fill=lambda blocks: self._pool.import_blocks(blocks, data),
        )
