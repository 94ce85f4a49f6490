"""Blocks lent to whoever drafts: free ones only, as long as there are plenty, and back as soon as there are not."""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.blocks import BlockPool

_KEPT_SHARE = 8  # one block in so many stays free


class Loans:
    """What of a pool is lent. Nothing cached is evicted for a loan."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: set[int] = set()

    @property
    def is_due(self) -> bool:
        """Whether the pool needs its blocks back."""
        return bool(self.blocks) and self._pool.num_available < self._pool.num_blocks // _KEPT_SHARE

    def take(self, count: int) -> list[int] | None:
        """So many blocks, each with one owner; None where too few would be left."""
        if self._pool.num_free - count < self._pool.num_blocks // _KEPT_SHARE:
            return None
        taken = self._pool.allocate_free(count)
        self.blocks.update(taken)
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        returned = list(blocks)
        self.blocks.difference_update(returned)
        self._pool.release(returned)
