"""Requests with several answers: each runs as a sequence of its own, and the request ends with the last of them.

The first computes the prompt, the others begin with its blocks (engine/sched/forks.py). One that resumes an earlier
run begins with what the cache holds of the prompt instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.request import Begun, Choice, Completion, FinishReason, Request, Usage

_MARK = "\0"  # stands in nobody's own ids


class Choices:
    """The requests with several answers under way, and what of them ended."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, Completion | None]] = {}
        self._request_ids: dict[str, str] = {}

    def begin(self, request: Request) -> list[Request]:
        """The sequences to run for a request."""
        first = f"{request.id}{_MARK}0"
        begun = [*request.resume_choices, *[Begun()] * request.n]
        sequences = [
            replace(
                request,
                id=f"{request.id}{_MARK}{choice}",
                n=1,
                choice=choice,
                fork_of=first if choice else "",
                resume_ids=begun[choice].token_ids,
                resume_logprobs=begun[choice].logprobs,
                resume_choices=(),
            )
            for choice in range(request.n)
        ]
        self._open[request.id] = {sequence.id: None for sequence in sequences}
        self._request_ids |= {sequence.id: request.id for sequence in sequences}
        return sequences

    def sequence_ids(self, request_id: str) -> tuple[str, ...]:
        """The sequences of a request that haven't ended; none if it has one answer."""
        return tuple(name for name, ended in self._open.get(request_id, {}).items() if ended is None)

    def request_id(self, sequence_id: str) -> str:
        """The request that a sequence belongs to."""
        return self._request_ids.get(sequence_id, sequence_id)

    def end(self, ended: Completion) -> Completion | None:
        """Takes the end of a sequence. The end of its request, if it was the last."""
        request_id = self._request_ids.pop(ended.request_id, None)
        if request_id is None:
            return ended
        parts = self._open[request_id]
        parts[ended.request_id] = ended
        known = [part for part in parts.values() if part is not None]
        if len(known) < len(parts):
            return None
        del self._open[request_id]
        return joined(request_id, known)


def joined(request_id: str, parts: Sequence[Completion]) -> Completion:
    """The end of a request from those of its answers, in order: the prompt counts once, outputs are added up."""
    answers = (FinishReason.STOP, FinishReason.LENGTH)
    bad = next((part for part in parts if part.finish_reason not in answers), None)
    first = parts[0]
    usage = Usage(
        first.usage.prompt_tokens,
        first.usage.hit_tokens,
        sum(part.usage.output_tokens for part in parts),
        sum(part.usage.steps for part in parts),
    )
    choices = tuple(Choice(part.text, part.finish_reason, part.logprobs, part.stopped_by) for part in parts)
    return replace(bad or first, request_id=request_id, usage=usage, choices=() if bad else choices)
