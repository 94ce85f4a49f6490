"""The choices of a completion: its answers with their logprobs, as OpenAI shows them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from batchsvc.batches.tool_calls import message_of
from engine.request import Choice, Completion, FinishReason, SpelledLogprob

_NEVER = -9999.0
REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def choices_of(completion: Completion, params: Mapping[str, Any], *, ident: str) -> list[dict[str, Any]]:
    """All answers in order. `params` are those of the unit's row, `ident` is the line's."""
    choices = []
    for index, answer in enumerate(completion.answers):
        said, reason = message_of(answer.text, REASONS[answer.finish_reason], params, ident=ident, choice=index)
        logprobs = None if answer.logprobs is None else logprobs_of(answer.logprobs)
        shown = {"index": index, "message": said, "logprobs": logprobs, "finish_reason": reason}
        choices.append(shown | _stop_of(answer))
    return choices


def logprobs_of(found: Sequence[SpelledLogprob]) -> dict[str, Any]:
    """The logprobs of a chat completion's choice."""
    content = [
        {
            **_token(one.piece, one.logprob),
            "top_logprobs": [_token(piece, logprob) for piece, logprob in one.top],
        }
        for one in found
    ]
    return {"content": content, "refusal": None}


def text_choices_of(answers: Sequence[Choice]) -> list[dict[str, Any]]:
    """All answers of a text completion in order."""
    return [
        {
            "index": index,
            "text": answer.text,
            "logprobs": None if answer.logprobs is None else text_logprobs_of(answer.logprobs),
            "finish_reason": REASONS.get(answer.finish_reason, "stop"),
            **_stop_of(answer),
        }
        for index, answer in enumerate(answers)
    ]


def text_logprobs_of(found: Sequence[SpelledLogprob]) -> dict[str, Any]:
    """The logprobs of a text completion's choice. An offset is where a token begins in the text, in characters; one
    that goes on with a character begins after what is whole before it."""
    decoder, sizes = codecs.getincrementaldecoder("utf-8")("replace"), [0]
    sizes += [len(decoder.decode(one.piece)) for one in found]
    return {
        "tokens": [_text(one.piece) for one in found],
        "token_logprobs": [_said(one.logprob) for one in found],
        "top_logprobs": [{_text(piece): _said(logprob) for piece, logprob in reversed(one.top)} for one in found],
        "text_offset": list(accumulate(sizes))[:-1],
    }


def warnings_of(answers: Sequence[Choice]) -> list[dict[str, str]]:
    """What the line of these answers has to say of them: a logprob that is no number."""
    numbers = (
        number
        for answer in answers
        for one in answer.logprobs or ()
        for number in (one.logprob, *(logprob for _, logprob in one.top))
    )
    if all(_said(number) is not None for number in numbers):
        return []
    says = "Some of the log probabilities are no numbers and stand as null: the engine's arithmetic went wrong there."
    return [{"code": "logprobs_not_finite", "param": "logprobs", "message": says}]


def _stop_of(answer: Choice) -> dict[str, Any]:
    """What ended an answer that a stop string or stop token ended, under vLLM's name for it."""
    return {} if answer.stopped_by is None else {"stop_reason": answer.stopped_by}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": _said(logprob), "bytes": list(piece)}


def _said(logprob: float) -> float | None:
    """A logprob as JSON can say it: OpenAI's number for a token that can't come, null for what is no number."""
    return max(logprob, _NEVER) if logprob < math.inf else None
