"""In which order batches are admitted to the quota of their project. Pure.

Batches are admitted by age, and one that doesn't fit yet lets no younger one pass: small ones can't starve a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """A batch that waits, and what it will hold."""

    batch_id: str
    tokens: int


def admitted(waiting: Sequence[Waiting], *, held: int, quota: int | None) -> list[str]:
    """Those of the waiting batches that may start, given what others hold; alone, anything may."""
    taken = []
    for one in waiting:
        if quota is not None and held and held + one.tokens > quota:
            break
        held += one.tokens
        taken.append(one.batch_id)
    return taken
