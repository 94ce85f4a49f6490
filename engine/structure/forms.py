"""The answers under way that must have a form: what may come next in each of them, step by step.

Once a step's tokens are known, the masks of the next one are made in a thread of their own, while this one writes the
tokens down and plans; so they cost time only where that takes less.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import numpy as np
from numpy.typing import NDArray

from engine.request import Request
from engine.sched.plan import StepPlan, StepResult
from engine.structure.grammar import GrammarError
from engine.structure.matchers import Grammars, Matcher
from engine.text import TextModel

CODE = "grammar_not_usable"
"""Of an answer that ends because its grammar can't be compiled, or turned out too complex."""


_Masks = dict[Matcher, NDArray[np.int32]]


class Forms:
    """Matchers by request id. The model's vocabulary is read when the first of them starts."""

    def __init__(self, text: TextModel | None, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._make: Callable[[], Grammars] | None = None
        if text is not None and eos_ids:
            tokenizer = text.tokenizer
            self._make = lambda: Grammars(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)
        self._grammars: Grammars | None = None
        self._open: dict[str, Matcher] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")  # started with the first mask
        self._ahead: Future[_Masks] | None = None

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
        masks: _Masks = self._ahead.result() if self._ahead is not None else {}
        self._ahead = None
        matchers = [self._open[seq_id] for seq_id in wanted]
        masks |= _masks(self._grammars, [matcher for matcher in matchers if matcher not in masks])
        return replace(plan, masks={seq_id: masks[self._open[seq_id]] for seq_id in wanted})

    def follow(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Reads the tokens of a step and begins the masks that come next. The result without tokens of answers whose
        grammar failed."""
        reasons: dict[str, str] = {}
        going: list[Matcher] = []
        for seq_id in plan.masks:
            matcher = self._open[seq_id]
            if (reason := matcher.error) is not None:
                reasons[seq_id] = sentence(reason)
                continue
            for token_id in result.sampled.get(seq_id, ()):
                matcher.push(token_id)
            if not matcher.is_complete:
                going.append(matcher)
        if going and self._grammars is not None:
            entered = Event()
            self._ahead = self._thread.submit(_masks, self._grammars, going, entered)
            entered.wait()  # else the other thread waits for the GIL until this one has nothing left to do
        if not reasons:
            return result
        return replace(
            result, failed={**result.failed, **reasons}, codes={**result.codes, **dict.fromkeys(reasons, CODE)}
        )


def _masks(grammars: Grammars, matchers: list[Matcher], entered: Event | None = None) -> _Masks:
    if entered is not None:
        entered.set()
    return dict(zip(matchers, grammars.masks(matchers), strict=True)) if matchers else {}


def sentence(reason: str) -> str:
    """What the line is told."""
    return f"The form that the answer must have can't be followed: {reason}."
