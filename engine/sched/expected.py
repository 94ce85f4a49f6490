"""Knows which prefixes later work needs that isn't waiting yet, so that eviction plans beyond the waiting requests.

Whoever hands out a piece of a job says, under a name, how many later pieces begin with which prefix, and takes it back
when the piece ends. The pieces of one job count the same later ones, so of several counts for a key the largest holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from engine.cache.tables import BlockTables
from engine.request import Expectation

BEYOND_WAITING = float(1 << 50)
"""A next use that is further ahead than the rank of any waiting request."""


def block_uses(keys: Sequence[bytes], block_tokens: int, uses: Iterable[tuple[int, int]]) -> dict[bytes, int]:
    """How often each full block of a prefix is needed: keys in prefix order against (depth_tokens, count) pairs."""
    uses = list(uses)
    found: dict[bytes, int] = {}
    for end, key in enumerate(keys, 1):
        count = max((count for depth, count in uses if depth >= end * block_tokens), default=0)
        if count:
            found[key] = count
    return found


class ExpectedUses:
    """Counts of pending uses by block key, each held under a name."""

    def __init__(self) -> None:
        self._held: dict[str, Mapping[bytes, int]] = {}
        self._by_key: dict[bytes, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def announce(self, name: str, expectation: Expectation | None, tables: BlockTables) -> bool:
        """Holds what is expected, in the place of what `name` held before; None: nothing more. True if it held
        something."""
        had_any = self.drop(name)
        if expectation is not None:
            depth = max((depth for depth, _ in expectation.uses), default=0)
            prefix = expectation.prompt_ids[:depth]
            keys = tables.prefix_keys(prefix, salt=expectation.salt, adapter=expectation.adapter)
            self.hold(name, block_uses(keys, tables.block_tokens, expectation.uses))
        return had_any

    def hold(self, name: str, uses: Mapping[bytes, int]) -> None:
        """Takes the place of what `name` held before."""
        self.drop(name)
        self._held[name] = uses
        for key, count in uses.items():
            self._by_key.setdefault(key, {})[name] = count

    def drop(self, name: str) -> bool:
        """Forgets what `name` held. False: nothing."""
        uses = self._held.pop(name, {})
        for key in uses:
            counts = self._by_key[key]
            del counts[name]
            if not counts:
                del self._by_key[key]
        return bool(uses)

    def next_use(self, key: bytes) -> float:
        """How far ahead a block is needed: beyond all that waits, the sooner the more need it; inf for never."""
        counts = self._by_key.get(key)
        return BEYOND_WAITING - max(counts.values()) if counts else math.inf
