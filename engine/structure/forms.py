"""The answers under way that must have a form: what may come next in each of them, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.request import Request
from engine.sched.plan import StepPlan, StepResult, TokenMasks
from engine.structure.grammar import GrammarError
from engine.structure.matchers import Grammars, Matcher
from engine.text import TextModel

CODE = "grammar_not_usable"
"""Of an answer that ends because its grammar can't be compiled, or turned out too complex."""


class Forms:
    """Matchers by request id. The model's vocabulary is read when the first of them starts."""

    def __init__(self, text: TextModel | None, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._make: Callable[[], Grammars] | None = None
        if text is not None and eos_ids:
            tokenizer = text.tokenizer
            self._make = lambda: Grammars(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
        self._grammars: Grammars | None = None
        self._open: dict[str, Matcher] = {}

    def start(self, request: Request) -> Matcher | None:
        """The matcher of an answer that begins; None: it may have any form. Raises GrammarError."""
        if not request.params.grammar:
            return None
        if self._grammars is None:
            if self._make is None:
                raise GrammarError("the model names no token that ends an answer")
            self._grammars = self._make()
        matcher = self._open[request.id] = self._grammars.start(request.params.grammar)
        return matcher

    def end(self, request_id: str) -> None:
        """The answer ended; it need not have a form."""
        self._open.pop(request_id, None)

    def masked(self, plan: StepPlan) -> StepPlan:
        """The plan with the masks of the rows that it samples."""
        wanted = [chunk.seq_id for chunk in plan.chunks if chunk.logit_rows and chunk.seq_id in self._open]
        if not wanted or self._grammars is None:
            return plan
        bits = self._grammars.masks([self._open[seq_id] for seq_id in wanted])
        return replace(plan, masks=TokenMasks({seq_id: row for row, seq_id in enumerate(wanted)}, bits))

    def checked(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result without tokens of answers whose grammar failed."""
        reasons = {
            seq_id: sentence(reason)
            for seq_id in (plan.masks.rows if plan.masks else ())
            if (reason := self._open[seq_id].error) is not None
        }
        if not reasons:
            return result
        return replace(
            result, failed={**reasons, **result.failed}, codes={**dict.fromkeys(reasons, CODE), **result.codes}
        )


def sentence(reason: str) -> str:
    """What the line is told."""
    return f"The form that the answer must have can't be followed: {reason}."
