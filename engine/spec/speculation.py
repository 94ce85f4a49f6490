"""Joins proposer, measured odds and costs to what the scheduler asks for: the draft of each sequence in this step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine.cache.loans import Loans
from engine.cache.sequence import Sequence as RunningSequence
from engine.sched.plan import LastState, StepPlan
from engine.spec.costs import StepCosts, seconds
from engine.spec.gate import window_lengths
from engine.spec.odds import Odds
from engine.spec.proposer import Grades, Proposer

Cut = Callable[[str, tuple[int, ...]], tuple[int, ...]]
"""Of a sequence id and its draft, what of it may be right."""

MOST_SEQUENCES = 32
"""More that run are a full batch: its steps compute as fast as they read, so a wrong draft costs what a right one
brings, and looking for drafts costs too. That is so on CPUs; the costs of steps are measured as they go by, this bound
isn't. A GPU whose steps still wait for weights at more rows could gain beyond it: whether it would was never measured,
and MOST_ROWS leaves less than a token for each there."""
MOST_ROWS = 64
"""Rows of a step with drafts."""
MOST_DRAFT = 15
_TRIAL_STEPS = 256
"""Steps after which a proposer that isn't free is tried again, with one token."""
_LOOK_STEPS = 16
"""Steps after which those that overlap are read in between once, to look for drafts."""


class Speculation:
    """Not thread-safe. `is_gated` False, for tests and measurements: every proposal is drafted, whole; `most_draft`
    tokens of it at most. `salt` is that of the requests that are drafted for; None: all."""

    def __init__(
        self, proposer: Proposer, *, is_gated: bool = True, most_draft: int = MOST_DRAFT, salt: str | None = None
    ) -> None:
        self._proposer = proposer
        self._is_gated = is_gated
        self._most_draft = most_draft
        self._salt = salt
        self._odds = Odds(proposer.first_odds)
        self._costs = StepCosts()
        self._loans: Loans | None = None
        self._cut: Cut = lambda _, draft: draft
        self._has_drafted = False
        self._steps = 0
        self._tried_at = 0  # the step of the last trial
        self._idle_steps = 0  # in a row, in which nothing ran

    def drafts(
        self, running: Sequence[RunningSequence], step_tokens: int, *, only_interactive: bool = False
    ) -> dict[str, tuple[int, ...]]:
        """What may be computed on trial in a step of at most `step_tokens`, by sequence id: behind those that decode
        and whose tokens are all known, perhaps only interactive ones. All that decode still get their own token."""
        self._steps += 1
        self._idle_steps = 0 if running else self._idle_steps + 1
        if self._loans is not None and (self._loans.is_due or self._idle_steps > 1):  # what waits may lack room
            self._proposer.give_back()
        if len(running) > MOST_SEQUENCES:
            return {}
        decodes = [seq for seq in running if seq.num_pending == 1]
        asking = [seq for seq in decodes if seq.is_interactive or not only_interactive]
        sequences = [seq for seq in asking if not seq.num_unread and self._may_draft(seq)]
        num_decodes = len(decodes)
        most_tokens = min(step_tokens, MOST_ROWS) - num_decodes
        if not sequences or most_tokens <= 0:
            return {}
        fair = 2 * most_tokens // len(sequences)  # rather than long looks for what can't all be taken
        most = [min(seq.max_outputs - seq.num_outputs - 1, fair, self._most_draft) for seq in sequences]
        for seq in sequences:
            self._odds.look_back(seq)
        grades = self._proposer.look(sequences, most)
        if self._is_gated:
            odds = [self._odds.of(seq.id, own) for seq, own in zip(sequences, grades, strict=True)]
            cost = partial(seconds, self._costs.curve())
            lengths = window_lengths(odds, num_decodes, most_tokens, cost, self._proposer.cost)
            if not any(lengths) and not self._proposer.is_free:
                lengths = self._trial(grades)
        else:
            lengths = [min(len(own), most_tokens // len(sequences)) for own in grades]
        asked = [
            max(length, min(len(own), self._proposer.is_free)) for length, own in zip(lengths, grades, strict=True)
        ]
        drafts: dict[str, tuple[int, ...]] = {}
        for seq, own, length, found in zip(
            sequences, grades, lengths, self._proposer.propose(sequences, asked), strict=True
        ):
            self._odds.note(seq, found, own)
            if kept := self._cut(seq.id, found[:length]):
                drafts[seq.id] = kept
        self._has_drafted = bool(drafts)
        return drafts

    def _may_draft(self, seq: RunningSequence) -> bool:
        return seq.request.pooling is None and self._salt in (None, seq.request.salt)

    def wants_tokens(self, num_running: int) -> bool:
        """Whether the step in flight should be read before the next one is planned, as drafts begin at known tokens."""
        return num_running <= MOST_SEQUENCES and (self._has_drafted or self._steps % _LOOK_STEPS == 0)

    def _trial(self, grades: Sequence[Grades]) -> list[int]:
        """One token of the first that has any, if the last trial is long ago: steps that overlap have tokens to look
        at only now and then, so no single step may be the one for it."""
        first = next((index for index, own in enumerate(grades) if own), None)
        if first is None or self._steps - self._tried_at < _TRIAL_STEPS:
            return [0] * len(grades)
        self._tried_at = self._steps
        return [int(index == first) for index in range(len(grades))]

    def see(self, states: Mapping[str, LastState]) -> None:
        """What the step had that is committed next."""
        if states:
            self._proposer.see(states)

    def cut_by(self, cut: Cut) -> None:
        """Of each draft only what this leaves of it is computed."""
        self._cut = cut

    def borrow(self, loans: Loans) -> None:
        """From where the proposer may borrow blocks."""
        self._loans = loans
        self._proposer.borrow(loans)

    def give_back(self) -> bool:
        """Gives all borrowed blocks back. False: there were none."""
        return self._proposer.give_back()

    def observe(self, plan: StepPlan, took_s: float) -> None:
        """A step took so long."""
        if plan.num_tokens <= MOST_ROWS and all(chunk.is_decode for chunk in plan.chunks):
            self._costs.observe(plan.num_tokens, took_s)

    def forget(self, seq_id: str, *, is_last: bool = False) -> None:
        """The sequence ended. `is_last`: there is no other one, so nothing more is kept for those to come."""
        self._proposer.forget(seq_id)
        self._odds.forget(seq_id)
        if is_last:
            self._proposer.give_back()
