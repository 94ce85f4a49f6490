"""What was generated of requests that still run: as it grows, and as the next owner of their rows gets it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from engine.request import Begun, NewToken, TokenLogprobs


class Generated(NamedTuple):
    """New tokens of each answer of a running request, and what the cache held when it began."""

    answers: tuple[Begun, ...]
    hit_tokens: int


class Growing:
    """The new tokens of one request, step by step."""

    def __init__(self, hit_tokens: int) -> None:
        self._hit_tokens = hit_tokens
        self._answers: list[tuple[list[int], list[TokenLogprobs]]] = []

    def add(self, tokens: Iterable[NewToken]) -> None:
        for token_id, choice, logprobs in tokens:
            while len(self._answers) <= choice:
                self._answers.append(([], []))
            token_ids, found = self._answers[choice]
            token_ids.append(token_id)
            if logprobs is not None:
                found.append(logprobs)

    def so_far(self) -> Generated:
        answers = tuple(Begun(tuple(token_ids), tuple(found)) for token_ids, found in self._answers)
        return Generated(answers, self._hit_tokens)


def joined(first: Sequence[Begun], then: Sequence[Begun]) -> tuple[Begun, ...]:
    """The answers of an earlier run with what was added to them since."""
    pairs = zip_longest(first, then, fillvalue=Begun())
    return tuple(Begun(a.token_ids + b.token_ids, a.logprobs + b.logprobs) for a, b in pairs)
