"""Proposes what followed the last time the same tokens came, in prompt or answer: right where text is quoted or edited.

The index is that of LZ77 compressors: for each pair of tokens the place where it came last, and for each place the one
before it with the same pair. Of the latest places the one where most tokens match is taken, and of equals the latest.
Each token is indexed once, in constant time; memory grows by two numbers a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.cache.loans import Loans
from engine.cache.sequence import Sequence as RunningSequence
from engine.sched.plan import LastState
from engine.spec.proposer import Grades

MOST_MATCH = 16
"""Tokens compared: a place where so many match is as good as any."""
MOST_PLACES = 32
"""Places looked at: what follows a frequent pair is no better known after more of them."""

_GRADES = (2, 3, 4, 6, 9, 13)
"""Matching tokens from which a proposal has a higher grade."""
_GRADE_AT = [sum(length >= least for least in _GRADES[1:]) for length in range(_GRADES[-1] + 1)]


class PairIndex:
    """Places in one growing text. The text itself is the caller's, given anew with each call."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}  # place of the second token of a pair
        self._before: list[int] = []  # for each place the one before it with the same pair; -1: none

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes what came since the last call."""
        last, before = self._last, self._before
        if not before and tokens:
            before.append(-1)
        for place in range(len(before), len(tokens)):
            pair = (tokens[place - 1], tokens[place])
            before.append(last.get(pair, -1))
            last[pair] = place

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The place whose last tokens are those of the text, and how many are; (-1, 0) if not even two are."""
        found, longest = -1, 0
        end = len(tokens) - 1
        place = self._before[end] if tokens else -1
        for _ in range(MOST_PLACES):
            if place < 0 or longest == MOST_MATCH:
                break
            length = 2
            while length < MOST_MATCH and length <= place and tokens[place - length] == tokens[end - length]:
                length += 1
            if length > longest:
                found, longest = place, length
            place = self._before[place]
        return found, longest


class NgramProposer:
    """Looks up each sequence in itself. A grade says how many tokens match, those of the proposal included."""

    first_odds = (0.25, 0.35, 0.5, 0.6, 0.75, 0.85)
    is_free = True

    def __init__(self) -> None:
        self._indexes: dict[str, PairIndex] = {}
        self._starts: dict[str, int] = {}  # where what was just looked at begins

    def look(self, sequences: Sequence[RunningSequence], most_tokens: Sequence[int]) -> list[Grades]:
        return [self._look(seq, most) for seq, most in zip(sequences, most_tokens, strict=True)]

    def cost(self, lengths: Sequence[int]) -> float:
        return 0.0

    def propose(self, sequences: Sequence[RunningSequence], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        return [
            continued(seq.tokens, self._starts[seq.id], length) if length else ()
            for seq, length in zip(sequences, lengths, strict=True)
        ]

    def see(self, states: Mapping[str, LastState]) -> None:
        pass

    def borrow(self, loans: Loans) -> None:
        pass

    def give_back(self) -> bool:
        return False

    def forget(self, seq_id: str) -> None:
        self._indexes.pop(seq_id, None)
        self._starts.pop(seq_id, None)

    def _look(self, seq: RunningSequence, most: int) -> Grades:
        index = self._indexes.get(seq.id)
        if index is None:
            index = self._indexes[seq.id] = PairIndex()
        index.extend(seq.tokens)
        place, length = index.match(seq.tokens)
        if place < 0:
            return ()
        self._starts[seq.id] = place + 1
        return tuple(_GRADE_AT[min(length + ahead, _GRADES[-1])] for ahead in range(most))


def continued(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; where the text ends, what was copied goes on: the period repeats."""
    copied = list(tokens[start : start + count])
    for ahead in range(count - len(copied)):
        copied.append(copied[ahead])
    return tuple(copied)
