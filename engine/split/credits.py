"""Who may send how much: the decode side grants credit in blocks, the prefill side spends it prompt by prompt; pure.

Both sides know what a prompt costs: its blocks, at most `most_blocks`. Each lane has credit of its own, so that batch
prompts never hold what an interactive one needs, and may lie before it neither here nor there. Within a lane credit is
granted for prompts in their order and spent in the same order: a purse is always that of whole prompts, and no two
prompts wait for each other's credit. A prompt's credit is free again once its request runs, or is gone.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from engine.request import Lane


def cost(num_blocks: int, most_blocks: int) -> int:
    """Credit that a prompt of so many blocks takes."""
    return max(1, min(num_blocks, most_blocks))


class Grant(NamedTuple):
    """Credit for a prompt, by its name."""

    name: str
    blocks: int
    lane: Lane


class Grants:
    """The decode side's book: prompts that were sent, and what of their credit is granted and not free again. Each lane
    may have `most_blocks` of it."""

    def __init__(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.open_of = dict.fromkeys(Lane, 0)
        self._ungranted: dict[Lane, deque[Grant]] = {lane: deque() for lane in Lane}
        self._wanted: dict[str, Grant] = {}
        self._granted: set[str] = set()

    @property
    def open_blocks(self) -> int:
        """Of all lanes."""
        return sum(self.open_of.values())

    def ask(self, name: str, num_blocks: int, lane: Lane) -> None:
        """A prompt was sent."""
        self._wanted[name] = asked = Grant(name, cost(num_blocks, self.most_blocks), lane)
        self._ungranted[lane].append(asked)

    def grant(self, num_available: int) -> list[Grant]:
        """Whose turn it is, and for how much, while so many blocks are held by nobody; interactive ones first. The
        first of a lane always is, when no other credit of that lane is open: what runs makes room for it in the end."""
        return [grant for lane in Lane for grant in self._grant(lane, num_available)]

    def _grant(self, lane: Lane, num_available: int) -> list[Grant]:
        found: list[Grant] = []
        ungranted = self._ungranted[lane]
        while ungranted:
            first = ungranted[0]
            is_wanted = first.name in self._wanted
            room = min(self.most_blocks - self.open_of[lane], num_available - self.open_blocks)
            if is_wanted and first.blocks > room and self.open_of[lane]:
                break
            ungranted.popleft()
            if is_wanted:
                self._granted.add(first.name)
                self.open_of[lane] += first.blocks
            found.append(first)  # one that isn't wanted is skipped by the other side, but paid for
        return found

    def free(self, name: str) -> None:
        """The prompt's request runs, or is wanted no more. Nothing happens the second time."""
        asked = self._wanted.pop(name, None)
        if asked is not None and name in self._granted:
            self._granted.remove(name)
            self.open_of[asked.lane] -= asked.blocks

    def forget(self, names: set[str]) -> None:
        """Their peer is gone: nothing of theirs is granted or to be granted."""
        for name in names:
            self.free(name)
        for lane, ungranted in self._ungranted.items():
            self._ungranted[lane] = deque(asked for asked in ungranted if asked.name not in names)


class Purse:
    """The prefill side's: prompts of one peer in the order of their lanes, and the credit to begin them."""

    def __init__(self, most_blocks: int) -> None:
        self.blocks = dict.fromkeys(Lane, 0)
        self._most_blocks = most_blocks
        self._waiting: dict[Lane, deque[tuple[str | None, int]]] = {lane: deque() for lane in Lane}  # None: cancelled

    def __len__(self) -> int:
        return sum(name is not None for waiting in self._waiting.values() for name, _ in waiting)

    def queue(self, name: str, num_blocks: int, lane: Lane) -> None:
        self._waiting[lane].append((name, cost(num_blocks, self._most_blocks)))

    def earn(self, num_blocks: int, lane: Lane) -> None:
        """Credit came."""
        self.blocks[lane] += num_blocks

    def cancel(self, name: str) -> None:
        """It is skipped, but paid for: its credit was granted, or will be. What is paid for in a row counts as one, so
        that prompts which come and go leave nothing behind."""
        for lane, waiting in self._waiting.items():
            if not any(name == other for other, _ in waiting):
                continue
            kept: deque[tuple[str | None, int]] = deque()
            for other, price in waiting:
                left = None if other == name else other
                if left is None and kept and kept[-1][0] is None:
                    price += kept.pop()[1]
                kept.append((left, price))
            self._waiting[lane] = kept

    def first(self, lane: Lane) -> str | None:
        """The prompt to begin, for which there is credit; None: there is none, or not the credit for it."""
        waiting = self._waiting[lane]
        while waiting and waiting[0][1] <= self.blocks[lane]:
            name, price = waiting[0]
            if name is not None:
                return name
            waiting.popleft()
            self.blocks[lane] -= price
        return None

    def begin(self, lane: Lane) -> None:
        """Pays for that first one."""
        _, price = self._waiting[lane].popleft()
        assert price <= self.blocks[lane], "a prompt is begun without credit"
        self.blocks[lane] -= price
