"""The answers under way that must have a form: what may come next in each of them, step by step.

Once a step's tokens are known, the masks of the next one are made in a thread of their own, while this one writes the
tokens down, plans and prepares the next step: whoever needs them waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.errors import GrammarError
from engine.request import Request
from engine.sched.plan import StepPlan, StepResult
from engine.text import TextModel

if TYPE_CHECKING:
    from engine.structure.matchers import Grammars, Matcher

CODE = "grammar_not_usable"
"""Of an answer that ends because its grammar can't be compiled, or turned out too complex."""


_Masks = dict["Matcher", NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class _Job:
    """Masks that are being made; nobody else touches these matchers meanwhile."""

    matchers: frozenset[Matcher]
    masks: Future[_Masks]


class _StepMasks(Mapping[str, NDArray[np.int32]]):
    """The masks of a step, by sequence id. Whoever looks first waits until they are made."""

    def __init__(self, matchers: Mapping[str, Matcher], jobs: Sequence[_Job]) -> None:
        self._matchers = matchers
        self._jobs = jobs

    @cached_property
    def _made(self) -> dict[str, NDArray[np.int32]]:
        masks = {matcher: mask for job in self._jobs for matcher, mask in job.masks.result().items()}
        return {seq_id: masks[matcher] for seq_id, matcher in self._matchers.items()}

    def __getitem__(self, seq_id: str) -> NDArray[np.int32]:
        return self._made[seq_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __reduce__(self) -> tuple[type[dict[str, NDArray[np.int32]]], tuple[dict[str, NDArray[np.int32]]]]:
        return dict, (self._made,)


class Forms:
    """Matchers by request id. The model's vocabulary is read when the first of them starts."""

    def __init__(self, text: TextModel | None, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._make: Callable[[], Grammars] | None = None
        if text is not None and eos_ids:
            tokenizer = text.tokenizer

            def make() -> Grammars:
                from engine.structure.matchers import Grammars  # its library is loaded with the first form

                return Grammars(tokenizer, vocab_size=vocab_size, eos_ids=eos_ids)

            self._make = make
        self._grammars: Grammars | None = None
        self._open: dict[str, Matcher] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")  # started with the first mask
        self._ahead: _Job | None = None

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

    def cut(self, seq_id: str, draft: tuple[int, ...]) -> tuple[int, ...]:
        """A draft up to its first token that the answer's form forbids: no place behind it could count."""
        matcher = self._open.get(seq_id)
        if matcher is None or matcher.is_ended:
            return draft
        if self._ahead is not None and matcher in self._ahead.matchers:
            self._ahead.masks.result()  # until then it is the other thread's
        return draft[: matcher.fitting(draft)]

    def masked(self, plan: StepPlan) -> StepPlan:
        """The plan with the masks of the rows that it samples."""
        wanted = {
            chunk.seq_id: self._open[chunk.seq_id]
            for chunk in plan.chunks
            if chunk.logit_rows and chunk.seq_id in self._open
        }
        if not wanted or self._grammars is None:
            return plan
        jobs = [] if self._ahead is None else [self._ahead]
        self._ahead = None
        begun = {matcher for job in jobs for matcher in job.matchers}
        drafts = {wanted[c.seq_id]: c.draft for c in plan.chunks if c.num_draft and c.seq_id in wanted}
        if missing := [matcher for matcher in wanted.values() if matcher not in begun and matcher not in drafts]:
            jobs.append(self._begin(missing, partial(_masks, self._grammars, missing)))
        if drafts:
            jobs.append(self._begin(drafts, partial(_window_masks, self._grammars, drafts)))
        return replace(plan, masks=_StepMasks(wanted, jobs))

    def follow(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Reads the tokens of a step and begins the masks that come next. Where a grammar fails, the tokens before stay
        in the result, beside the reason: the answer may have come to its end with one of them."""
        if self._grammars is None or not plan.masks:
            return result
        matchers = {seq_id: self._open[seq_id] for seq_id in plan.masks}
        read = [seq_id for seq_id in matchers if seq_id in result.sampled]
        sound: dict[str, tuple[int, ...]] = {name: () for name in read if matchers[name].error is not None}
        for place in range(max((len(result.sampled[seq_id]) for seq_id in read), default=0)):
            more = [name for name in read if place < len(result.sampled[name]) and not matchers[name].is_ended]
            before = [matchers[name].state.deep_copy() for name in more] if place else []
            self._grammars.push([matchers[name] for name in more], [result.sampled[name][place] for name in more])
            for name, state in zip(more, before, strict=False):
                if matchers[name].error is not None:
                    matchers[name].blame(state)
            sound |= {name: result.sampled[name][:place] for name in more if matchers[name].error is not None}
        for seq_id in matchers.keys() - result.sampled.keys():
            matchers[seq_id].look()
        going = [matchers[seq_id] for seq_id in read if not matchers[seq_id].is_ended]
        if going:
            entered = Event()
            self._ahead = self._begin(going, partial(_masks, self._grammars, going, entered))
            entered.wait()  # else the other thread waits for the GIL until this one has nothing left to do
        reasons = {seq_id: sentence(matcher.error) for seq_id, matcher in matchers.items() if matcher.error is not None}
        if not reasons:
            return result
        left = {name: sound.get(name, token_ids) for name, token_ids in result.sampled.items()}
        return replace(
            result,
            sampled={name: token_ids for name, token_ids in left.items() if token_ids or name not in reasons},
            failed={**result.failed, **reasons},
            codes={**result.codes, **dict.fromkeys(reasons, CODE)},
        )

    def _begin(self, matchers: Iterable[Matcher], make: Callable[[], _Masks]) -> _Job:
        return _Job(frozenset(matchers), self._thread.submit(make))


def _masks(grammars: Grammars, matchers: Sequence[Matcher], entered: Event | None = None) -> _Masks:
    """One row each. `entered` is set when this begins."""
    if entered is not None:
        entered.set()
    return dict(zip(matchers, grammars.masks(matchers)[:, None], strict=True))


def _window_masks(grammars: Grammars, drafts: Mapping[Matcher, Sequence[int]]) -> _Masks:
    return dict(zip(drafts, grammars.window_masks(list(drafts), list(drafts.values())), strict=True))


def sentence(reason: str) -> str:
    """What the line is told."""
    return f"The form that the answer must have can't be followed: {reason}."
