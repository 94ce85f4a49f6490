"""Keeps the block tables of sequences: the one place where block pool and prefix index meet.

    admit      takes the longest cached chain of full blocks; of a prompt that is cached to its very last token the
               last block is copied, because that token is computed again and its block is written
    grow       makes the positions of the next chunk writable: new blocks, and a copy of a block that others read
    commit     puts blocks that a committed step filled into the index; if another sequence was faster, its block
               takes the place of ours
    adopt      puts blocks that another engine computed into the index, where nobody holds them
    trim       gives back blocks that only held draft tokens which turned out wrong
    release    gives all references back; indexed blocks stay cached until they are evicted

So a sequence's indexed blocks are exactly the entries of its chain, and a block has at least as many references as any
block below it in the tree. What this costs: of two sequences that compute the same block at once, one throws it away.

Copies are collected for the step plan. They run before anything of that step is written and after freed blocks were
poisoned, so a source may be evicted and rewritten in the same step; neither source nor target is reported as freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from typing import NamedTuple

from engine.cache.blocks import BlockPool
from engine.cache.loans import Loans
from engine.cache.prefix import Entry, PrefixIndex, Scope
from engine.cache.sequence import Sequence


class Copy(NamedTuple):
    """Block `source` is to be copied to block `target`."""

    source: int
    target: int


class BlockTables:
    """Block tables over a pool of `num_blocks`. Without an index nothing is shared but by `fork`.

    `next_use(key)` says how far ahead a cached block is needed, `math.inf` for never.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, index: PrefixIndex | None, *, next_use: Callable[[bytes], float]
    ) -> None:
        self.block_tokens = block_tokens
        self._index = index
        if index is None:
            self.pool = BlockPool(num_blocks)
        else:
            self.pool = BlockPool(
                num_blocks, next_use=lambda block: next_use(index.key_of(block)), on_evict=index.discard
            )
        self.loans = Loans(self.pool)
        self._copies: list[Copy] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def extend_keys(self, seq: Sequence) -> None:
        """Brings `seq.block_keys` up to the tokens that are known."""
        if self._index is not None:
            if seq.scope is None:
                seq.scope = self._index.scope(seq.request.adapter, seq.request.salt)
            self._index.extend_keys(seq.block_keys, seq.scope, seq.tokens, seq.num_known)

    def prefix_keys(self, prompt_ids: Ids[int], *, salt: str, adapter: str) -> list[bytes]:
        """Keys of the full blocks of a prompt that has no sequence."""
        keys: list[bytes] = []
        if self._index is not None:
            self._index.extend_keys(keys, self._index.scope(adapter, salt), prompt_ids, len(prompt_ids))
        return keys

    def match(self, seq: Sequence) -> list[Entry]:
        """The longest cached chain of the waiting sequence's full blocks. Changes nothing."""
        if self._index is None or seq.scope is None:
            return []
        return self._index.match(seq.scope, seq.block_keys, seq.tokens)

    def cached(self, prompt_ids: Ids[int], *, salt: str, adapter: str) -> list[Entry]:
        """The longest cached chain of the full blocks of a prompt that has no sequence."""
        if self._index is None:
            return []
        keys = self.prefix_keys(prompt_ids, salt=salt, adapter=adapter)
        return self._index.match(self._index.scope(adapter, salt), keys, prompt_ids)

    def adopt(
        self, prompt_ids: Ids[int], depths: range, *, salt: str, adapter: str, fill: Callable[[list[int]], None]
    ) -> int:
        """Puts the full blocks at `depths` of a prompt into the index, once `fill` has written them. Returns how many
        are new: none where the blocks before them aren't cached, or no room is left."""
        chain = self.cached(prompt_ids, salt=salt, adapter=adapter)
        if self._index is None or len(chain) < depths.start or depths.stop <= len(chain):
            return 0
        held = [entry.block for entry in chain]
        self.pool.share(held)  # room for the new ones isn't made of those before them
        try:
            if len(depths) > self.pool.num_available:
                return 0
            blocks = self.pool.allocate(len(depths))
            self.pool.forget_freed(blocks)
            try:
                fill(blocks)
                return self._insert(prompt_ids, depths, blocks, chain, self._index.scope(adapter, salt))
            finally:
                self.pool.release(reversed(blocks))
        finally:
            self.pool.release(reversed(held))

    def admit(self, seq: Sequence, chain: list[Entry]) -> None:
        """Gives the sequence the blocks of `chain`, as `match` just found it."""
        hit_tokens = len(chain) * self.block_tokens
        whole = hit_tokens == len(seq.tokens)
        seq.entries = chain[:-1] if whole else chain
        seq.block_ids = [entry.block for entry in seq.entries]
        self.pool.share(seq.block_ids)
        if whole:
            hit_tokens = self._admit_whole(seq, chain[-1])
        seq.admit(hit_tokens)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Gives the child the parent's blocks of its first `num_tokens` tokens, the last one perhaps in part."""
        child.block_ids = parent.block_ids[: self.num_blocks_for(num_tokens)]
        child.entries = parent.entries[: num_tokens // self.block_tokens]
        self.pool.share(child.block_ids)
        child.admit(num_tokens)

    def room(self, seq: Sequence) -> int:
        """Tokens that `grow` can make room for right now."""
        available = self.pool.num_available - self._needs_copy(seq)
        if available < 0:
            return 0
        return (len(seq.block_ids) + available) * self.block_tokens - seq.computed_tokens

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Makes the next `num_tokens` positions writable; `room` said that they fit."""
        if self._needs_copy(seq):
            at = seq.computed_tokens // self.block_tokens
            source, target = seq.block_ids[at], self.pool.allocate(1)[0]
            self._copies.append(Copy(source, target))
            seq.block_ids[at] = target
            self.pool.release([source])
        missing = self.num_blocks_for(seq.computed_tokens + num_tokens) - len(seq.block_ids)
        if missing > 0:
            seq.block_ids += self.pool.allocate(missing)

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Indexes the full blocks of the first `num_tokens` positions, whose KV is computed and tokens are known."""
        seq.committed_tokens = num_tokens
        if self._index is None or seq.scope is None:
            return
        first, end = len(seq.entries), num_tokens // self.block_tokens
        if first >= end:
            return
        self.extend_keys(seq)
        for depth in range(first, end):
            block = seq.block_ids[depth]
            parent = seq.entries[-1] if seq.entries else None
            entry = self._index.insert(parent, seq.scope, seq.block_keys[depth], seq.tokens, depth, block)
            if entry.block == block:
                self.pool.retain(block, depth)
            else:
                self.pool.share([entry.block])
                self.pool.release([block])
                seq.block_ids[depth] = entry.block
            seq.entries.append(entry)

    def trim(self, seq: Sequence) -> None:
        """Takes the blocks away that lie wholly behind the computed positions."""
        needed = self.num_blocks_for(seq.computed_tokens)
        self.pool.release(seq.block_ids[needed:])
        del seq.block_ids[needed:]

    def release(self, seq: Sequence) -> None:
        """Takes all blocks from the sequence. The deepest turn idle first."""
        self.pool.release(reversed(seq.block_ids))
        seq.block_ids, seq.entries = [], []

    def num_shared(self, seq: Sequence) -> int:
        """How many of its blocks others reference too: the first ones, as sharing only falls with depth."""
        low, high = 0, len(seq.block_ids)
        while low < high:
            middle = (low + high) // 2
            if self.pool.num_references(seq.block_ids[middle]) > 1:
                low = middle + 1
            else:
                high = middle
        return low

    def take_copies(self) -> tuple[Copy, ...]:
        """Copies since the last call, in order; the next step has to begin with them."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError when pool, index and the tables of all sequences disagree."""
        sequences = list(sequences)
        self.pool.check_integrity([*(seq.block_ids for seq in sequences), sorted(self.loans.blocks)])
        if self._index is not None:
            self._index.check_integrity()
        for seq in sequences:
            assert seq.committed_tokens <= seq.computed_tokens <= len(seq.tokens), f"{seq.id}: counts out of order"
            assert seq.computed_tokens <= len(seq.block_ids) * self.block_tokens, f"{seq.id}: KV without a block"
            for depth, entry in enumerate(seq.entries):
                assert entry.block == seq.block_ids[depth], f"{seq.id}: block {depth} is not its entry's"
                assert entry.parent is (seq.entries[depth - 1] if depth else None), f"{seq.id}: broken chain"
                assert not self.pool.is_writable(entry.block), f"{seq.id}: an indexed block is writable"

    def _insert(self, prompt_ids: Ids[int], depths: range, blocks: list[int], chain: list[Entry], scope: Scope) -> int:
        assert self._index is not None, "nothing is adopted without an index"
        keys: list[bytes] = []
        self._index.extend_keys(keys, scope, prompt_ids, len(prompt_ids))
        parent, num_new = (chain[depths.start - 1] if depths.start else None), 0
        for depth, block in zip(depths, blocks, strict=True):
            parent = self._index.insert(parent, scope, keys[depth], prompt_ids, depth, block)
            if parent.block == block:
                self.pool.retain(block, depth)
                num_new += 1
        return num_new

    def _admit_whole(self, seq: Sequence, last: Entry) -> int:
        """Copies the block of the last token; without a free block that token's block is computed again."""
        if not self.pool.num_available:
            return len(seq.block_ids) * self.block_tokens
        target = self.pool.allocate(1)[0]  # may be the source itself, if it was idle and the last one to evict
        self._copies.append(Copy(last.block, target))
        seq.block_ids.append(target)
        return len(seq.tokens) - 1

    def _needs_copy(self, seq: Sequence) -> bool:
        """Whether the next position lies in a block that others read."""
        at = seq.computed_tokens // self.block_tokens
        return at < len(seq.block_ids) and not self.pool.is_writable(seq.block_ids[at])
