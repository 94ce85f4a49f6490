"""Who may send how much: the decode side grants credit in blocks, the prefill side spends it prompt by prompt; pure.

Both sides know what a prompt costs: its blocks, at most `most_blocks`. Credit is granted for prompts in their order and
spent in the same order, so a side's purse is always that of whole prompts and no two prompts wait for each other's
credit. A prompt's credit is free again once its request runs, or is gone.
"""

from __future__ import annotations

from collections import deque


def cost(num_blocks: int, most_blocks: int) -> int:
    """Credit that a prompt of so many blocks takes."""
    return max(1, min(num_blocks, most_blocks))


class Grants:
    """The decode side's book: prompts that were sent, and what of their credit is granted and not free again."""

    def __init__(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.open_blocks = 0
        self._ungranted: deque[tuple[str, int]] = deque()
        self._costs: dict[str, int] = {}  # of prompts that are wanted
        self._granted: set[str] = set()

    def ask(self, name: str, num_blocks: int) -> None:
        """A prompt was sent."""
        self._costs[name] = price = cost(num_blocks, self.most_blocks)
        self._ungranted.append((name, price))

    def grant(self, num_available: int) -> list[tuple[str, int]]:
        """Whose turn it is, and for how much, while so many blocks are held by nobody. The first one always is, when no
        other credit is open: what runs makes room for it in the end."""
        found = []
        while self._ungranted:
            name, price = self._ungranted[0]
            is_wanted = name in self._costs
            room = min(self.most_blocks, num_available) - self.open_blocks
            if is_wanted and price > room and self.open_blocks:
                break
            self._ungranted.popleft()
            if is_wanted:
                self._granted.add(name)
                self.open_blocks += price
            found.append((name, price))  # one that isn't wanted is skipped by the other side, but paid for
        return found

    def free(self, name: str) -> None:
        """The prompt's request runs, or is wanted no more. Nothing happens the second time."""
        price = self._costs.pop(name, 0)
        if name in self._granted:
            self._granted.remove(name)
            self.open_blocks -= price

    def forget(self, names: set[str]) -> None:
        """Their peer is gone: nothing of theirs is granted or to be granted."""
        for name in names:
            self.free(name)
        self._ungranted = deque(entry for entry in self._ungranted if entry[0] not in names)


class Purse:
    """The prefill side's: prompts of one peer in their order, and the credit to begin them."""

    def __init__(self, most_blocks: int) -> None:
        self.blocks = 0
        self._most_blocks = most_blocks
        self._waiting: deque[tuple[str, int]] = deque()
        self._cancelled: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting) - len(self._cancelled)

    def queue(self, name: str, num_blocks: int) -> None:
        self._waiting.append((name, cost(num_blocks, self._most_blocks)))

    def cancel(self, name: str) -> None:
        """It is skipped, but paid for: its credit was granted, or will be."""
        if any(name == waiting for waiting, _ in self._waiting):
            self._cancelled.add(name)

    def next(self) -> str | None:
        """The prompt to begin, paid for; None: there is none, or not the credit for it."""
        while self._waiting and self._waiting[0][1] <= self.blocks:
            name, price = self._waiting.popleft()
            self.blocks -= price
            if name not in self._cancelled:
                return name
            self._cancelled.remove(name)
        return None
