"""The choices of a completion: its answers with their logprobs, as OpenAI shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from engine.request import Choice, Completion, FinishReason, SpelledLogprob
from workers.tool_calls import message_of

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def choices_of(completion: Completion, params: Mapping[str, Any], *, ident: str) -> list[dict[str, Any]]:
    """All answers in order. `params` are those of the unit's row, `ident` is the line's."""
    choices = []
    for index, answer in enumerate(completion.answers):
        said, reason = message_of(answer.text, REASONS[answer.finish_reason], params, ident=ident, choice=index)
        logprobs = None if answer.logprobs is None else logprobs_of(answer.logprobs)
        choices.append({"index": index, "message": said, "logprobs": logprobs, "finish_reason": reason})
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
        }
        for index, answer in enumerate(answers)
    ]


def text_logprobs_of(found: Sequence[SpelledLogprob]) -> dict[str, Any]:
    """The logprobs of a text completion's choice; an offset counts the characters of the tokens before."""
    tokens = [_text(one.piece) for one in found]
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [{_text(piece): logprob for piece, logprob in reversed(one.top)} for one in found],
        "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
    }


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", errors="replace")


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _text(piece), "logprob": logprob, "bytes": list(piece)}
