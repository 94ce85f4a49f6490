"""What passes between API processes and engine workers in Redis: names of streams, and messages as bytes. Pure.

    calls:<model>   API -> workers  calls that wait; the workers of a model read it as one group, so each goes to one
    ready:<model>   workers         a key that each of them renews often: without it nobody is there to take a call
    stops:<worker>  API -> worker   calls that nobody waits for any more
    news:<api>      workers -> API  what comes of its calls; it expires soon after its process stops renewing it

An entry has one field, a message. Texts of a call are numbered, so that one that got lost is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from engine.request import Choice, Completion, FinishReason, NewText, SpelledLogprob, Usage

FIELD = b"m"
GROUP = "workers"
READY_TTL_S = 1.5  # how long a worker counts as there after its last sign
READY_S = 0.4  # how often it gives one
NEWS_TTL_S = 5.0  # how long what is said to an API process waits for one that doesn't read
SILENCE_S = 3.0  # a call of which nothing is heard for so long is lost
_PREFIX = "batchsvc:"
_LEAST = -1e9  # stands for minus infinity, which JSON can't say


def calls_of(digest: str) -> str:
    return f"{_PREFIX}calls:{digest[:16]}"


def ready_of(digest: str) -> str:
    return f"{_PREFIX}ready:{digest[:16]}"


def stops_of(worker: str) -> str:
    return f"{_PREFIX}stops:{worker}"


def news_of(api: str) -> str:
    return f"{_PREFIX}news:{api}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCall:
    """A call to run. `params` are those of a unit row, with `max_tokens`; `api` is who wants to hear of it."""

    id: str
    api: str
    prompt_ids: Sequence[int]
    params: Mapping[str, Any]
    seed: int
    salt: str
    streams: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """A worker has a call."""

    call_id: str
    worker: str


@dataclass(frozen=True, slots=True)
class Grown:
    """What became certain of a call's answers; `no` counts from 0."""

    call_id: str
    no: int
    texts: tuple[NewText, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer, after `num_grown` texts: what these have left of it (`is_rest`), or, as workers of 0.1 say it, all of
    it once more. `fingerprint` says what gave it."""

    call_id: str
    num_grown: int
    completion: Completion
    fingerprint: str | None = None
    is_rest: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no answer, as the caller shall read it."""

    call_id: str
    status: int
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Alive:
    """A worker lives and has these calls of the process that it says this to."""

    worker: str
    call_ids: tuple[str, ...]


News = Taken | Grown | Ended | Failed | Alive


def encode_call(call: NewCall) -> bytes:
    return orjson.dumps(
        {
            "id": call.id,
            "api": call.api,
            "prompt_ids": list(call.prompt_ids),
            "params": call.params,
            "seed": call.seed,
            "salt": call.salt,
            "streams": call.streams,
        }
    )


def decode_call(data: bytes) -> NewCall:
    """Raises ValueError, KeyError or TypeError for what is no call."""
    call = NewCall(**orjson.loads(data))
    texts, ids = (call.id, call.api, call.salt), call.prompt_ids
    if not all(isinstance(one, str) for one in texts) or not all(type(one) is int for one in ids):
        raise TypeError("This is no call.")
    return call


def encode_news(news: News) -> bytes:
    match news:
        case Taken(call_id, worker):
            said: list[Any] = ["taken", call_id, worker]
        case Grown(call_id, no, texts):
            said = ["grown", call_id, no, [[one.text, one.choice, _plain(one.logprobs)] for one in texts]]
        case Ended(call_id, num_grown, completion, fingerprint, is_rest):
            plain = _plain_completion(completion) | {"is_rest": is_rest}
            said = ["ended", call_id, num_grown, plain, fingerprint]
        case Failed(call_id, status, code, message, param):
            said = ["failed", call_id, status, code, message, param]
        case Alive(worker, call_ids):
            said = ["alive", worker, call_ids]
    return orjson.dumps(said)


def decode_news(data: bytes) -> News:
    """Raises ValueError, KeyError, IndexError or TypeError for what is no news."""
    kind, *said = orjson.loads(data)
    if not said or not isinstance(said[0], str):
        raise TypeError("This is no news.")
    return _READERS[kind](*said)


def _grown(call_id: str, no: int, texts: Sequence[Sequence[Any]]) -> Grown:
    return Grown(call_id, no, tuple(NewText(text, choice, _spelled(found)) for text, choice, found in texts))


def _ended(call_id: str, num_grown: int, plain: Mapping[str, Any], fingerprint: str | None) -> Ended:
    return Ended(call_id, num_grown, _completion(call_id, plain), fingerprint, plain.get("is_rest") is True)


_READERS: Mapping[str, Callable[..., News]] = {
    "taken": Taken,
    "grown": _grown,
    "ended": _ended,
    "failed": Failed,
    "alive": lambda worker, call_ids: Alive(worker, tuple(call_ids)),
}


def _plain_completion(completion: Completion) -> dict[str, Any]:
    usage = completion.usage
    return {
        "usage": [usage.prompt_tokens, usage.hit_tokens, usage.output_tokens, usage.steps],
        "answers": [
            [one.text, one.finish_reason, None if one.logprobs is None else _plain(one.logprobs), one.stopped_by]
            for one in completion.answers
        ],
    }


def _completion(call_id: str, plain: Mapping[str, Any]) -> Completion:
    answers = tuple(
        Choice(text, FinishReason(reason), None if found is None else _spelled(found), stopped_by)
        for text, reason, found, stopped_by in plain["answers"]
    )
    first = answers[0]
    return Completion(
        request_id=call_id,
        token_ids=(),
        text=first.text,
        finish_reason=first.finish_reason,
        usage=Usage(*plain["usage"]),
        logprobs=first.logprobs,
        stopped_by=first.stopped_by,
        choices=answers if len(answers) > 1 else (),
    )


def _plain(found: Sequence[SpelledLogprob]) -> list[Any]:
    """Logprobs as JSON: bytes as the characters of Latin-1 that stand for them; what is no number becomes null."""
    return [[*_token(one.piece, one.logprob), [_token(piece, logprob) for piece, logprob in one.top]] for one in found]


def _token(piece: bytes, logprob: float) -> list[Any]:
    return [piece.decode("latin-1"), max(logprob, _LEAST)]


def _spelled(plain: Sequence[Sequence[Any]]) -> tuple[SpelledLogprob, ...]:
    return tuple(
        SpelledLogprob(
            piece.encode("latin-1"),
            _number(logprob),
            tuple((token.encode("latin-1"), _number(value)) for token, value in top),
        )
        for piece, logprob, top in plain
    )


def _number(said: float | None) -> float:
    return float("nan") if said is None else said
