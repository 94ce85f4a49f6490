"""A smaller model of the same vocabulary proposes what it would say itself.

It runs like the model, by steps of its own between the model's, with the same parameters and draws: for a drawn answer
both then pick the same token more often than two draws would. Its layers keep their KV in the memory of the model's
first layers, in blocks borrowed from the same pool (engine/cache/loans.py). What a borrowed block held is computed
again when the pool has wanted it back.

Of a text that is new to it, it first reads a bounded piece a step, and proposes once it has read all of it. What it has
of a text that ended is kept till the next one ends: a text of the same project that begins alike takes that over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.cache.loans import Loans
from engine.cache.sequence import Sequence as RunningSequence
from engine.errors import MemoryShortageError
from engine.request import SamplingParams
from engine.sched.plan import Chunk, LastState, StepPlan, StepResult
from engine.spec.costs import StepCosts, seconds

MOST_READ = 256
"""Tokens read in one step, beside those that are proposed."""
_MOST_READ_OF_ALL = 2048
_WORTH = 16
"""Unread tokens for each one that may still come: a longer text isn't worth reading for so short an answer. A draft
reads a token in about a hundredth of the time of a step of the model, and saves a share of a step with each."""
_GRADES = 8


class DraftRunner(Protocol):
    """What the draft model runs on."""

    def execute(self, plan: StepPlan) -> StepResult: ...


@dataclass(slots=True)
class _Draft:
    """One text as the draft model has it: the first `computed` of `tokens` have KV in `blocks`. Those from `guessed_at`
    on were `guesses` of its own, and may be wrong."""

    params: SamplingParams
    salt: str
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    guessed_at: int = 0
    guesses: list[int] = field(default_factory=list)

    def take_over(self, past: _Draft, tokens: Sequence[int]) -> None:
        """What a text that ended has in common with this one, which has nothing yet."""
        self.blocks = past.blocks
        for known, token in zip(past.tokens[: past.computed], tokens, strict=False):
            if known != token:
                break
            self.computed += 1

    def settle(self, tokens: Sequence[int]) -> None:
        """Forgets the KV of wrong guesses; the last token is always computed, to know what comes next."""
        right = 0
        for guess, token in zip(self.guesses, tokens[self.guessed_at :], strict=False):
            if guess != token:
                break
            right += 1
        if self.guesses:
            self.computed = min(self.computed, self.guessed_at + right)
        self.computed = min(self.computed, len(tokens) - 1)
        self.guessed_at, self.guesses = len(tokens), []


class DraftProposer:
    """Grades say how far behind the text a token is. `reads_all`, for measurements: every text is worth reading, and is
    read in pieces as large as a step's."""

    first_odds = (0.6,) * _GRADES
    is_free = False

    def __init__(self, runner: DraftRunner, block_tokens: int, *, reads_all: bool = False) -> None:
        self._runner = runner
        self._block_tokens = block_tokens
        self._reads_all = reads_all
        self._loans: Loans | None = None
        self._drafts: dict[str, _Draft] = {}
        self._past: _Draft | None = None  # of the text that ended last
        self._costs = StepCosts()
        self._steps = 0

    def see(self, states: Mapping[str, LastState]) -> None:
        pass

    def borrow(self, loans: Loans) -> None:
        self._loans = loans

    def look(self, sequences: Sequence[RunningSequence], most_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        return [
            tuple(min(ahead, _GRADES - 1) for ahead in range(most)) if self._is_worth(seq) else ()
            for seq, most in zip(sequences, most_tokens, strict=True)
        ]

    def cost(self, lengths: Sequence[int]) -> float:
        if not self._costs.is_known:
            return 0.0  # tried once, then known
        curve = self._costs.curve()
        return sum(
            seconds(curve, sum(length > ahead for length in lengths)) for ahead in range(max(lengths, default=0))
        )

    def propose(self, sequences: Sequence[RunningSequence], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        try:
            return self._propose(sequences, lengths)
        except MemoryShortageError:  # the answers can do without drafts
            self.give_back()
            return [()] * len(sequences)

    def _propose(self, sequences: Sequence[RunningSequence], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        found: dict[str, list[int]] = {seq.id: [] for seq in sequences}
        wanted = {seq.id: length for seq, length in zip(sequences, lengths, strict=True)}
        asked = [seq for seq in sequences if wanted[seq.id] and self._has_blocks(seq, wanted[seq.id])]
        going = self._read(asked, found)
        for ahead in range(1, max(lengths, default=0)):
            going = [seq for seq in going if wanted[seq.id] > ahead]
            if not going:
                break
            start = time.perf_counter()
            going = self._run([self._chunk(seq, 1) for seq in going], going, found)
            self._costs.observe(max(len(going), 1), time.perf_counter() - start)
        return [tuple(found[seq.id]) for seq in sequences]

    def give_back(self) -> bool:
        drafts = [*self._drafts.values(), *([self._past] if self._past is not None else [])]
        blocks = [block for draft in drafts for block in draft.blocks]
        self._drafts.clear()
        self._past = None
        if self._loans is not None:
            self._loans.give_back(blocks)
        return bool(blocks)

    def forget(self, seq_id: str) -> None:
        draft = self._drafts.pop(seq_id, None)
        if draft is None or self._loans is None:
            return
        if self._past is not None:
            self._loans.give_back(self._past.blocks)
        self._past = draft

    def _is_worth(self, seq: RunningSequence) -> bool:
        if self._reads_all:
            return True
        draft = self._drafts.get(seq.id)
        unread = len(seq.tokens) - (0 if draft is None else draft.computed)
        return unread <= _WORTH * (seq.max_outputs - seq.num_outputs)

    def _has_blocks(self, seq: RunningSequence, length: int) -> bool:
        draft = self._drafts.get(seq.id) or self._begun(seq)
        draft.settle(seq.tokens)
        missing = -(-(len(seq.tokens) + length) // self._block_tokens) - len(draft.blocks)
        more = self._loans.take(missing) if missing > 0 and self._loans is not None else []
        if more is None:
            return False
        draft.blocks += more
        return True

    def _begun(self, seq: RunningSequence) -> _Draft:
        salt = seq.request.salt
        draft = _Draft(replace(seq.request.params, grammar="", logprobs=None), salt)
        if self._past is not None and self._past.salt == salt:
            draft.take_over(self._past, seq.tokens)
            self._past = None
        self._drafts[seq.id] = draft
        return draft

    def _read(self, sequences: Sequence[RunningSequence], found: dict[str, list[int]]) -> list[RunningSequence]:
        """Reads what is new of each text, as far as a step goes; those that were read to their end have a token."""
        left = (_MOST_READ_OF_ALL if self._reads_all else MOST_READ) + len(sequences)
        chunks = []
        for seq in sequences:
            unread = len(seq.tokens) - self._drafts[seq.id].computed
            size = min(unread, max(left, 1))
            left -= size
            chunks.append(self._chunk(seq, size))
        return self._run(chunks, sequences, found)

    def _run(
        self, chunks: Sequence[Chunk], sequences: Sequence[RunningSequence], found: dict[str, list[int]]
    ) -> list[RunningSequence]:
        """Runs a step; the sequences that got a token."""
        if not chunks:
            return []
        result = self._runner.execute(StepPlan(step=self._steps, chunks=tuple(chunks)))
        self._steps += 1
        going = []
        for seq in sequences:
            (token_id,) = result.sampled.get(seq.id, (None,))
            if token_id is not None:
                self._drafts[seq.id].guesses.append(token_id)
                found[seq.id].append(token_id)
                going.append(seq)
        return going

    def _chunk(self, seq: RunningSequence, size: int) -> Chunk:
        draft = self._drafts[seq.id]
        tokens = [*seq.tokens, *draft.guesses]
        start, end = draft.computed, draft.computed + size
        draft.computed, draft.tokens = end, tokens
        samples = end == len(tokens)
        return Chunk(
            seq_id=seq.id,
            token_ids=tuple(tokens[start:end]),
            start=start,
            block_ids=tuple(draft.blocks[: -(-end // self._block_tokens)]),
            logit_rows=(size - 1,) if samples else (),
            params=draft.params,
            num_prompt_tokens=seq.num_prompt_tokens,
            choice=seq.request.choice,
            history=tuple(tokens[:start]) if samples and draft.params.has_penalties else (),
        )
