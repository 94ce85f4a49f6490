"""What proposes tokens, for the gate and the scheduler: one protocol for all kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.cache.loans import Loans
from engine.cache.sequence import Sequence as RunningSequence
from engine.sched.plan import LastState

Grades = tuple[int, ...]
"""For each token that may be proposed how sure the proposer is of it: a class, from 0 on, on a scale of its own. How
often tokens of a class are right is measured (odds.py)."""


class Proposer(Protocol):
    """Proposes by whatever means. Nothing of it decides which tokens an answer has.

    A step asks first how sure it would be (`look`), and then for as many tokens as are worth their cost (`propose`).
    """

    @property
    def first_odds(self) -> Sequence[float]:
        """For each grade, how likely such a token is the right one, as long as nothing was measured."""

    @property
    def is_free(self) -> bool:
        """Whether `propose` costs next to nothing: then it is asked for tokens that won't be drafted, to measure it."""

    def look(self, sequences: Sequence[RunningSequence], most_tokens: Sequence[int]) -> list[Grades]:
        """For each sequence the grades of what could be proposed now, at most so many; all their tokens are known."""

    def cost(self, lengths: Sequence[int]) -> float:
        """Seconds that proposing so many tokens takes."""

    def propose(self, sequences: Sequence[RunningSequence], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        """For each sequence so many of the tokens just looked at; may be fewer."""

    def see(self, states: Mapping[str, LastState]) -> None:
        """The states of which the newest tokens were sampled, by sequence id, where the runner keeps them."""

    def borrow(self, loans: Loans) -> None:
        """From where it may borrow blocks, if it needs any."""

    def give_back(self) -> bool:
        """Gives all borrowed blocks back, as others need them. False: there were none."""

    def forget(self, seq_id: str) -> None:
        """The sequence ended; an unknown one is ignored."""
