"""Proposers for tests: they borrow nothing and cost nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from engine.cache.loans import Loans
from engine.cache.sequence import Sequence as RunningSequence
from engine.request import Request
from engine.sched.plan import LastState
from engine.spec.proposer import Grades
from tests.engine.oracle import VOCAB, next_token


class SimpleProposer:
    """Proposes up to as many tokens as it may; a subclass says which."""

    first_odds: tuple[float, ...] = (0.8,)
    is_free = False

    def __init__(self) -> None:
        self.random = random.Random(5)

    def look(self, sequences: Sequence[RunningSequence], most_tokens: Sequence[int]) -> list[Grades]:
        return [(0,) * self.random.randint(0, most) for most in most_tokens]

    def cost(self, lengths: Sequence[int]) -> float:
        return 0.0

    def propose(self, sequences: Sequence[RunningSequence], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.guess(seq, length) for seq, length in zip(sequences, lengths, strict=True)]

    def guess(self, seq: RunningSequence, length: int) -> tuple[int, ...]:
        """What may stand behind a sequence: nothing, where no subclass says more."""
        return ()

    def see(self, states: Mapping[str, LastState]) -> None:
        pass

    def borrow(self, loans: Loans) -> None:
        pass

    def give_back(self) -> bool:
        return False

    def forget(self, seq_id: str) -> None:
        pass


class Guesser(SimpleProposer):
    """Knows the oracle's answers; each of its tokens is right with the chance `right`, else any token."""

    def __init__(self, right: float) -> None:
        super().__init__()
        self._right = right
        self._requests: dict[str, Request] = {}

    def know(self, request: Request) -> None:
        self._requests[request.id] = request

    def guess(self, seq: RunningSequence, length: int) -> tuple[int, ...]:
        tokens, params = list(seq.tokens), self._requests[seq.id].params
        for _ in range(length):
            is_right = self.random.random() < self._right
            tokens.append(next_token(tokens, params) if is_right else self.random.randrange(VOCAB))
        return tuple(tokens[len(seq.tokens) :])
