"""How often proposed tokens are right, measured by looking back: for each grade, and for each sequence.

What was proposed is compared with what came, whether it was drafted or not; so a proposer that stopped being used is
still measured by its first token, and comes back when it is right again.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.sequence import Sequence as RunningSequence
from engine.spec.proposer import Grades

_GRADE_DOUBT = 8.0
"""Tokens that the first guess of a grade weighs."""
_SEQUENCE_DOUBT = 4.0
"""Tokens of a sequence's own that weigh as much as what its grade says."""
_KEEPS_GRADE = 1 - 1 / 512
_KEEPS_SEQUENCE = 1 - 1 / 16
"""The share of their weight that counts keep with each further token."""


class _Count:
    """Of some tokens, those that were right; recent ones weigh more."""

    __slots__ = ("right", "tried")

    def __init__(self, right: float = 0.0, tried: float = 0.0) -> None:
        self.right, self.tried = right, tried

    def add(self, is_right: bool, keeps: float) -> None:
        self.right = self.right * keeps + is_right
        self.tried = self.tried * keeps + 1.0


class Odds:
    """The chances of proposals. `first` has a guess for each grade."""

    def __init__(self, first: Sequence[float]) -> None:
        self._grades = [_Count(odds * _GRADE_DOUBT, _GRADE_DOUBT) for odds in first]
        self._sequences: dict[str, _Count] = {}
        self._proposed: dict[str, tuple[int, tuple[int, ...], Grades]] = {}

    def note(self, seq: RunningSequence, token_ids: tuple[int, ...], grades: Grades) -> None:
        """These were proposed to come next."""
        self._proposed[seq.id] = (seq.num_known, token_ids, grades)

    def look_back(self, seq: RunningSequence) -> None:
        """Compares what was proposed last with what came."""
        start, token_ids, grades = self._proposed.pop(seq.id, (0, (), ()))
        for token_id, grade, came in zip(token_ids, grades, seq.tokens[start : seq.num_known], strict=False):
            self._grades[grade].add(token_id == came, _KEEPS_GRADE)
            self._sequences.setdefault(seq.id, _Count()).add(token_id == came, _KEEPS_SEQUENCE)
            if token_id != came:
                break

    def of(self, seq_id: str, grades: Grades) -> list[float]:
        """For each token of these grades the chance that it is right, if those before it are."""
        own = self._sequences.get(seq_id) or _Count()
        found = []
        for grade in grades:
            known = self._grades[grade]
            share = known.right / known.tried
            found.append((own.right + _SEQUENCE_DOUBT * share) / (own.tried + _SEQUENCE_DOUBT))
        return found

    def forget(self, seq_id: str) -> None:
        self._sequences.pop(seq_id, None)
        self._proposed.pop(seq_id, None)
