"""Counts who uses which KV block; pure bookkeeping that never touches memory.

A block is in exactly one state:

    free        no reference, no content           allocate() takes it
    private     one or more references             its owners may write while there is only one
    cached      in the prefix index and referenced nobody writes it any more
    idle        in the prefix index, no reference  share() revives it, allocate() may evict it

Idle blocks are evicted by what is known about the future, never by age: first those that nobody is known to need,
then the one needed furthest ahead; of equals those that were never shared, of these the deepest in its prefix, so that
the common beginnings stay longest. What nobody needs and nobody ever shared is evicted even before a block is taken
that was never used, so that memory grows with what is needed, not with what was ever computed.
`next_use(block)` says how far ahead a block is needed, `math.inf` for never. It is asked when a block becomes idle and
again before it is evicted, so an answer may move nearer at any time; one that moved away is noticed at the latest when
the heap is rebuilt, as `reorder()` does.

Blocks whose content died are logged until `drain_freed()`, so that a pool in poison mode can overwrite them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free or idle; nothing was changed."""


def _never(_block: int) -> float:
    return math.inf


def _alone(block: int) -> Sequence[int]:
    return (block,)


class BlockPool:
    """Reference counts of blocks 0 … num_blocks − 1.

    `on_evict(block)` takes a block out of the prefix index and returns all blocks that left with it: the block and
    those that can't be found any more without it (all of them idle).
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        next_use: Callable[[int], float] = _never,
        on_evict: Callable[[int], Sequence[int]] = _alone,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_shared = 0  # blocks with two references or more
        self._next_use = next_use
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._depths: dict[int, int] = {}  # of cached and idle blocks
        self._was_shared: set[int] = set()  # of these, those that had two references, or were revived
        self._idle: dict[int, int] = {}  # block → stamp of its valid heap entry
        self._heap: list[tuple[float, bool, int, int, int]] = []  # (−next use, was shared, −depth, stamp, block)
        self._num_touched = 0  # blocks from here on were never taken; they lie at the bottom of the free ones
        self._stamp = 0
        self._freed: dict[int, None] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out without evicting any."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - self.num_available

    def num_references(self, block: int) -> int:
        return self._references[block]

    def is_writable(self, block: int) -> bool:
        """Whether its only owner may write it."""
        return self._references[block] == 1 and block not in self._depths

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference. Evicts idle blocks where too few are free."""
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_available} available")
        while len(self._free) - (self.num_blocks - self._num_touched) < count and self._evict(only_disposable=True):
            pass
        while len(self._free) < count:
            self._evict()
        return self._take(count)

    def allocate_free(self, count: int) -> list[int]:
        """The same of blocks that are free, at most `num_free`: nothing is evicted."""
        assert count <= self.num_free, f"{count} free blocks asked for, there are {self.num_free}"
        return self._take(count)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each; revives idle ones."""
        for block in blocks:
            references = self._references[block]
            if references == 0:
                del self._idle[block]  # a free block has no content to share: KeyError
            elif references == 1:
                self.num_shared += 1
            self._was_shared.add(block)
            self._references[block] = references + 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; without any, a cached block turns idle and another one is free."""
        for block in blocks:
            references = self._references[block] - 1
            assert references >= 0, f"block {block} is released more often than it was taken"
            self._references[block] = references
            if references == 1:
                self.num_shared -= 1
            elif references == 0:
                if block in self._depths:
                    self._make_idle(block)
                else:
                    self._make_free(block)

    def retain(self, block: int, depth: int) -> None:
        """Marks a referenced block as cached: it is full and in the index, `depth` blocks below the root."""
        assert self._references[block] > 0, f"block {block} is cached without an owner"
        assert block not in self._depths, f"block {block} is cached twice"
        self._depths[block] = depth

    def reorder(self) -> None:
        """Asks for the next use of all idle blocks again, because some are needed later than they were."""
        self._heap = [self._entry(idle, stamp) for idle, stamp in self._idle.items()]
        heapq.heapify(self._heap)

    def drain_freed(self) -> tuple[int, ...]:
        """Blocks whose content died since the last call, in order. They may have new owners by now."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def forget_freed(self, blocks: Iterable[int]) -> None:
        """What died in these blocks is overwritten already."""
        for block in blocks:
            self._freed.pop(block, None)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compares the counts with the block tables of all owners. Raises AssertionError with the numbers."""
        owned = Counter(block for table in tables for block in table)
        for block, references in enumerate(self._references):
            assert references == owned[block], f"block {block}: {references} references, {owned[block]} owners"
        idle = {block for block in self._depths if not owned[block]}
        assert idle == self._idle.keys(), f"idle blocks {sorted(self._idle)} should be {sorted(idle)}"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        used = sum(1 for references in self._references if references)
        total = used + len(self._idle) + len(self._free)
        assert total == self.num_blocks, f"used + idle + free = {total} of {self.num_blocks} blocks"
        assert not set(self._free) & (self._depths.keys() | owned.keys()), "a free block is cached or owned"
        shared = sum(1 for references in self._references if references > 1)
        assert self.num_shared == shared, f"{self.num_shared} shared blocks counted, {shared} found"
        valid = {entry[4] for entry in self._heap if self._idle.get(entry[4]) == entry[3]}
        assert valid == self._idle.keys(), "an idle block can't be evicted"

    def _take(self, count: int) -> list[int]:
        taken = [self._free.pop() for _ in range(count)]
        self._num_touched = max([self._num_touched, *(block + 1 for block in taken)])
        for block in taken:
            self._references[block] = 1
        return taken

    def _make_free(self, block: int) -> None:
        self._was_shared.discard(block)
        self._free.append(block)
        self._freed[block] = None

    def _make_idle(self, block: int) -> None:
        self._stamp += 1
        self._idle[block] = self._stamp
        if len(self._heap) > 2 * len(self._idle) + 64:  # mostly outdated entries: start over
            self.reorder()
        else:
            heapq.heappush(self._heap, self._entry(block, self._stamp))

    def _entry(self, block: int, stamp: int) -> tuple[float, bool, int, int, int]:
        return (-self._next_use(block), block in self._was_shared, -self._depths[block], stamp, block)

    def _evict(self, *, only_disposable: bool = False) -> bool:
        """Frees the idle block needed last, with all that hangs on it. False: none is left that may go."""
        while self._heap:
            recorded, was_shared, _, stamp, block = self._heap[0]
            if self._idle.get(block) != stamp:
                heapq.heappop(self._heap)
                continue
            entry = self._entry(block, stamp)
            if entry[0] > recorded:  # needed sooner than it was when it turned idle
                heapq.heapreplace(self._heap, entry)
                continue
            if only_disposable and (recorded > -math.inf or was_shared):
                return False
            heapq.heappop(self._heap)
            for lost in self._on_evict(block):
                del self._idle[lost], self._depths[lost]
                self._make_free(lost)
            return True
        return False
