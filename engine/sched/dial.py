"""Turns the targets for interactive answers into seconds that a step may take.

The targets are the time to the first token (TTFT) and the time between two tokens (ITL). The rule:

1. With an interactive answer under way a step takes at most 92 % of ITL: each step is one gap between its tokens, and
   what lies between two steps, and between the engine and who reads, takes its time and varies, too.
2. As long as interactive requests come, any step takes at most TTFT / 3: one that arrives waits for the step in flight,
   then for its own, and a third is left for a prompt that needs several and for another one that came at once. Where
   a further step is launched before the last one is read, it is TTFT / 4.
3. Interactive work is never held back by batch work. Within the limit it comes first: its decodes all, its prompts in
   pieces that leave the others' tokens in time, but never less than a quarter of the limit, and a few tokens of the
   first one whatever the limit. So steps may be longer where interactive work alone fills them. Batch work gets what
   remains, and nothing while a part of an interactive prompt is left over.
4. Batch work that got nothing in 16 steps gets the next token of one sequence, or a few of one prompt, in the next one.
5. Without targets, or when no interactive request was there for 60 s of steps, steps are full: nothing is lost.

Steps vary, so the limit is divided by how much longer than predicted three in a thousand of the last steps were. A step
that would be empty takes a little batch work all the same. So targets that can't be reached make work slow, and keep
none of it from its end.
"""

from __future__ import annotations

import math

from engine.sched.budget import StepBudget
from engine.sched.costs import MeasuredCosts, Work

QUIET_S = 60.0
"""Seconds of steps without interactive requests, after which none is expected at any moment."""
_ITL_SHARE = 0.92  # for the step itself
_PROMPT_SHARE = 0.25  # of the limit, which interactive prompts may take whatever else there is
_LATE_SHARE = 0.003  # of steps, which may be longer than what is reckoned with
_LEARNS = 0.02  # by so much more is reckoned with after a step that was longer
_MOST_SPREAD = 2.0
_PATIENCE = 16  # bounded steps without batch work, after which it is due


class Dial:
    """Bounds the steps of one engine. `ttft_s` and `itl_s` are targets, None for any time; `steps_ahead` is how many
    steps are launched before the oldest is read. What a step costs is measured (engine/sched/costs.py)."""

    def __init__(self, *, ttft_s: float | None = None, itl_s: float | None = None, steps_ahead: int = 0) -> None:
        self._ttft_s = math.inf if ttft_s is None else ttft_s / (3 + steps_ahead)
        self._itl_s = math.inf if itl_s is None else itl_s * _ITL_SHARE
        self._measured = MeasuredCosts()
        self._spread = 1.2
        self._quiet_s = math.inf
        self._last = StepBudget(0)
        self._starved = 0  # bounded steps in a row without batch work

    def budget(self, tokens: int, *, is_interactive: bool, is_answering: bool) -> StepBudget:
        """Of the next step, of at most so many tokens. `is_interactive`: an interactive request is there;
        `is_answering`: one has its first token."""
        if is_interactive:
            self._quiet_s = 0.0
        if self._last.spent_tokens:
            has_starved = self._last.is_bounded and not self._last.batch_tokens
            self._starved = self._starved + 1 if has_starved else 0
        limit_s = min(self._ttft_s, self._itl_s if is_answering else math.inf) / self._spread
        if self._quiet_s > QUIET_S or limit_s == math.inf:
            self._last = StepBudget(tokens)
        else:
            costs, is_due = self._measured.costs, self._starved >= _PATIENCE
            self._last = StepBudget(tokens, limit_s - costs.step_s, _PROMPT_SHARE * limit_s, costs, is_due=is_due)
        return self._last

    @property
    def is_set(self) -> bool:
        """Whether there is a target, so that steps should be measured."""
        return min(self._ttft_s, self._itl_s) < math.inf

    def observe(self, work: Work, seconds: float) -> None:
        """A step took so long."""
        costs = self._measured.costs
        longer = seconds / max(costs.step_s + costs.of(work), 1e-9)
        self._spread += _LEARNS * (1 - _LATE_SHARE if longer > self._spread else -_LATE_SHARE)
        self._spread = min(max(self._spread, 1.0), _MOST_SPREAD)
        self._quiet_s += seconds
        self._measured.observe(work, seconds)
