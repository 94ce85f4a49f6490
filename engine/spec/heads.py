"""Extra heads on the model propose tokens from what it has computed anyway: Medusa's idea, told what was drawn.

Medusa (2401.10774) puts small heads on the last hidden row, each of which says a later token; they have no KV, so there
is nothing to borrow, to read a prompt with, or to lose when a sequence is preempted, resumed or forked: a proposal
needs the last row alone. EAGLE (2401.15077) drafts with a layer of its own, which is right more often and needs a cache
beside the model's and a pass over each prompt. For a model of 30 thin layers, a fifth of whose weights are its head, a
layer costs as much as four of our heads, and what makes EAGLE's drafts better for the most part is known here too: a
head is told the tokens before its own, the drawn one and those proposed so far (as in Hydra, 2402.05109), by their
embeddings. All heads share one matrix of logits over a part of the vocabulary.

A proposal is drawn with the numbers of its places, as a draft model's is: for a drawn answer both then pick the same
token more often than two draws would.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.cache.loans import Loans
from engine.cache.sequence import Sequence as RunningSequence
from engine.request import SamplingParams
from engine.sample.row import SampleRow
from engine.sched.plan import LastState
from engine.spec.costs import StepCosts, seconds

_FIRST_ODDS, _LATER_ODDS = 0.6, 0.9
"""Of the first head, as long as nothing was measured, and of each over the one before it."""


class DraftHeads(Protocol):
    """What the heads run on."""

    @property
    def num_heads(self) -> int: ...

    def begin(self, states: Sequence[NDArray[np.float32]]) -> Any:
        """The rows to start from."""

    def next_ids(self, place: int, x: Any, token_ids: Sequence[int], rows: Sequence[SampleRow]) -> list[int | None]:
        """Takes the first rows on by a token each; what head `place` says comes next. None: it can't say."""


class HeadsProposer:
    """The grade of a token is the number of the head that says it."""

    is_free = False

    def __init__(self, heads: DraftHeads) -> None:
        self.first_odds = tuple(_FIRST_ODDS * _LATER_ODDS**place for place in range(heads.num_heads))
        self._heads = heads
        self._states: dict[str, LastState] = {}
        self._params: dict[str, SamplingParams] = {}
        self._costs = StepCosts()

    def see(self, states: Mapping[str, LastState]) -> None:
        self._states = dict(states)  # who isn't in the last step gets a row of its own with its next token

    def look(self, sequences: Sequence[RunningSequence], most_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return [
            tuple(range(min(most, self._heads.num_heads))) if self._knows(seq) else ()
            for seq, most in zip(sequences, most_tokens, strict=True)
        ]

    def cost(self, lengths: Sequence[int]) -> float:
        if not self._costs.is_known:
            return 0.0  # tried once, then known
        curve = self._costs.curve()
        return sum(
            seconds(curve, sum(length > place for length in lengths)) for place in range(max(lengths, default=0))
        )

    def propose(self, sequences: Sequence[RunningSequence], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        found: dict[str, list[int]] = {seq.id: [] for seq in sequences}
        asked = [(length, seq) for seq, length in zip(sequences, lengths, strict=True) if length and self._knows(seq)]
        asked.sort(key=lambda one: -one[0])  # so that those that go on are the first rows
        if asked:
            x = self._heads.begin([self._states[seq.id].values for _, seq in asked])
            for place in range(asked[0][0]):
                start = time.perf_counter()
                going = [seq for length, seq in asked if length > place]
                self._say(place, x, going, found)
                self._costs.observe(len(going), time.perf_counter() - start)
        return [tuple(found[seq.id]) for seq in sequences]

    def borrow(self, loans: Loans) -> None:
        pass

    def give_back(self) -> bool:
        return False

    def forget(self, seq_id: str) -> None:
        self._states.pop(seq_id, None)
        self._params.pop(seq_id, None)

    def _knows(self, seq: RunningSequence) -> bool:
        """Whether the row is that of the newest token: there is none of an answer that is resumed."""
        state = self._states.get(seq.id)
        return state is not None and state.num_tokens == len(seq.tokens)

    def _say(self, place: int, x: Any, going: Sequence[RunningSequence], found: dict[str, list[int]]) -> None:
        """One more token of each; those who have none are left behind, and what their rows then say doesn't count."""
        last = [found[seq.id][-1] if found[seq.id] else seq.tokens[-1] for seq in going]
        said = self._heads.next_ids(place, x, last, [self._row(seq, found[seq.id]) for seq in going])
        for seq, token_id in zip(going, said, strict=True):
            if token_id is not None and len(found[seq.id]) == place:
                found[seq.id].append(token_id)

    def _row(self, seq: RunningSequence, guesses: Sequence[int]) -> SampleRow:
        params = self._params.get(seq.id)
        if params is None:
            params = self._params[seq.id] = replace(seq.request.params, grammar="", logprobs=None)
        return SampleRow(
            params,
            len(seq.tokens) + len(guesses),
            seq.request.choice,
            history=(*seq.tokens, *guesses) if params.has_penalties else (),
            num_prompt_tokens=seq.num_prompt_tokens,
        )
