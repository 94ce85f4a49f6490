"""Holds the requests that wait, by lane and in order of rank, and knows which cached blocks they are going to need.

A follower of a prefix that is being computed is parked under that prefix's last key and comes back when the leader
commits it or goes away; so a step never looks at it again in between. Removing is lazy: a rank that left stays in the
heaps until it surfaces, and every operation costs O(log n) per key.
"""

from __future__ import annotations

import heapq
import math

from engine.cache.sequence import Sequence


class WaitingQueue:
    """Waiting sequences by rank; ranks are unique. Interactive ones stand in a line of their own."""

    def __init__(self) -> None:
        self._members: dict[int, Sequence] = {}
        self._lines: dict[bool, list[int]] = {True: [], False: []}  # heaps of ranks, of interactive ones and of others
        self._parked: dict[bytes, list[int]] = {}
        self._uses: dict[bytes, list[int]] = {}  # key → heap of ranks that need it, the dead ones included

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.rank in self._members

    def add(self, seq: Sequence) -> None:
        self._members[seq.rank] = seq
        self.put_back(seq)
        for key in seq.block_keys:
            heapq.heappush(self._uses.setdefault(key, []), seq.rank)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is. Only one that was popped may be added again."""
        del self._members[seq.rank]
        for key in seq.block_keys:
            self._drop_dead(key)

    def pop(self, *, is_interactive: bool) -> Sequence | None:
        """The next in one of the lines, which stays a member: `remove` it, `put_back` or `park` it."""
        line = self._lines[is_interactive]
        while line:
            seq = self._members.get(heapq.heappop(line))
            if seq is not None:
                return seq
        return None

    def put_back(self, seq: Sequence) -> None:
        heapq.heappush(self._lines[seq.is_interactive], seq.rank)

    def park(self, seq: Sequence, key: bytes) -> None:
        """Out of line until `wake(key)`."""
        self._parked.setdefault(key, []).append(seq.rank)

    def wake(self, key: bytes) -> bool:
        """Puts the sequences parked under `key` back in line. True if there were any."""
        woken = self._parked.pop(key, [])
        for rank in woken:
            if rank in self._members:
                self.put_back(self._members[rank])
        return bool(woken)

    def next_use(self, key: bytes) -> float:
        """How far ahead a block is needed: the rank of the first waiting sequence that has it, inf for none."""
        self._drop_dead(key)
        ranks = self._uses.get(key)
        return ranks[0] if ranks else math.inf

    def parked_keys(self) -> set[bytes]:
        """Keys under which living sequences are parked."""
        return {key for key, ranks in self._parked.items() if any(rank in self._members for rank in ranks)}

    def check_integrity(self) -> None:
        """Raises AssertionError when a member is neither in line nor parked, or in both."""
        heaps = [*self._lines.values(), *self._parked.values()]
        places = [rank for heap in heaps for rank in heap]
        living = sorted(rank for rank in places if rank in self._members)
        assert living == sorted(self._members), f"{len(self._members)} members in {len(living)} places"
        for seq in self._members.values():
            for key in seq.block_keys:
                assert self.next_use(key) <= seq.rank, f"{seq.id}: a block it needs counts as unneeded"

    def _drop_dead(self, key: bytes) -> None:
        ranks = self._uses.get(key)
        if ranks is None:
            return
        while ranks and ranks[0] not in self._members:
            heapq.heappop(ranks)
        if not ranks:
            del self._uses[key]


class PrefixLeaders:
    """Which running sequence is about to compute the block of which key. A hint that saves work: with colliding keys
    a sequence may wait for the wrong leader for a while, and is woken when that one's step commits. An interactive
    sequence never waits for batch work, which may have to wait itself: it takes the lead."""

    def __init__(self) -> None:
        self._leaders: dict[bytes, Sequence] = {}

    def claim(self, seq: Sequence, keys: list[bytes]) -> None:
        """The sequence computes these blocks, but for those that somebody computes already."""
        for key in keys:
            if not self._has_leader(key, seq):
                self._leaders[key] = seq

    def deepest_in_progress(self, seq: Sequence, keys: list[bytes]) -> bytes | None:
        """Of the sequence's keys that follow a cached prefix, the last one in a row that a leader is computing."""
        deepest = None
        for key in keys:
            if not self._has_leader(key, seq):
                break
            deepest = key
        return deepest

    def give_up(self, seq: Sequence, keys: list[bytes]) -> list[bytes]:
        """The sequence has computed these blocks, or never will. Returns the keys it was the leader of."""
        led = [key for key in dict.fromkeys(keys) if self._leaders.get(key) is seq]
        for key in led:
            del self._leaders[key]
        return led

    def leaders(self) -> dict[bytes, Sequence]:
        return dict(self._leaders)

    def _has_leader(self, key: bytes, seq: Sequence) -> bool:
        leader = self._leaders.get(key)
        return leader is not None and leader.is_interactive >= seq.is_interactive
