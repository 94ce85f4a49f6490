"""The body of a chat completion: what of it the engine runs, and what of it costs the line.

`parse_chat` checks a body and gives its messages and its sampling parameters, `fit` decides `max_tokens` once the
prompt's length is known. A feature that isn't supported is refused by name, never dropped silently: an answer without
it would look like an answer with it. Fields that change nothing about the answer are ignored. All refusals are
RequestErrors, which cost this line alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from batchsvc.files.lines import json_type, shown
from engine.errors import RequestError
from engine.request import SamplingParams

ROLES = ("system", "developer", "user", "assistant")
MAX_STOPS = 4
_SEEDS = 2**63

# field -> values that ask for nothing special; null always does
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A checked body. `params` is what a unit row carries, all but `max_tokens`; `max_tokens` None: not given."""

    messages: list[dict[str, Any]]
    params: dict[str, Any]
    max_tokens: int | None


def parse_chat(body: dict[str, Any]) -> ChatCall:
    """What a body asks for. Raises RequestError with the code and param of OpenAI's error body."""
    for name in sorted(_REFUSED.keys() & body.keys()):  # sorted: the same refusal for the same body
        value, harmless = body[name], _REFUSED[name]
        if value is not None and not any(_same(value, allowed) for allowed in harmless):
            raise RequestError(
                f"{name}={shown(value)} is not supported here; remove it from the body.",
                code="unsupported_parameter",
                param=name,
            )
    return ChatCall(
        messages=_messages(body),
        max_tokens=_max_tokens(body),
        params={
            "min_tokens": _integer(body, "min_tokens", 0, low=0),
            "temperature": _number(body, "temperature", 1.0, low=0.0, high=2.0),
            "top_k": _top_k(body),
            "top_p": _top_p(body),
            "seed": _seed(body),
            "stop": _stop(body),
            "stop_token_ids": _stop_token_ids(body),
            "ignore_eos": _boolean(body, "ignore_eos"),
        },
    )


def fit(call: ChatCall, *, prompt_tokens: int, context_tokens: int, default_max_tokens: int) -> dict[str, Any]:
    """`call.params` with the `max_tokens` that the line runs with. Raises RequestError when it can't run.

    A `max_tokens` that is given is kept or refused; one that is missing takes what the context leaves.
    """
    left = context_tokens - prompt_tokens
    if left < 1:
        raise RequestError(
            f"The prompt has {prompt_tokens} tokens, but the model's context holds {context_tokens}, "
            "the answer included: shorten the messages.",
            code="context_length_exceeded",
            param="messages",
        )
    if call.max_tokens is not None and call.max_tokens > left:
        raise RequestError(
            f"The prompt has {prompt_tokens} tokens and max_tokens is {call.max_tokens}: together more than the "
            f"{context_tokens} tokens of the model's context. Shorten the messages or lower max_tokens.",
            code="context_length_exceeded",
            param="messages",
        )
    max_tokens = min(default_max_tokens, left) if call.max_tokens is None else call.max_tokens
    params = {"max_tokens": max_tokens, **call.params}
    # the engine's own check last: a worker must never meet a request that it refuses to build
    _check_sampling(orjson.dumps(params))
    return params


@lru_cache(maxsize=4096)
def _check_sampling(params_json: bytes) -> None:
    params = orjson.loads(params_json)
    seed, stop, stop_token_ids = params["seed"] or 0, tuple(params["stop"]), tuple(params["stop_token_ids"])
    SamplingParams(**{**params, "seed": seed, "stop": stop, "stop_token_ids": stop_token_ids})


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if messages is None:
        raise RequestError("The body has no messages.", code="missing_required_parameter", param="messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of at least one message", messages)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(where, "an object with role and content", message)
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise RequestError(
                f"{where}.{name} is not supported here.", code="unsupported_parameter", param=f"{where}.{name}"
            )
    # templates know system; developer is its later name
    role = "system" if role == "developer" else role
    return {"role": role, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(where, "a string or a list of text parts", content)
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise _wrong(at, "an object with a type", part)
        if kind != "text":
            raise RequestError(
                f"{at} is a part of type {shown(kind)}; the model reads text only.",
                code="unsupported_parameter",
                param=at,
            )
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{at}.text", "a string", part.get("text"))
    return [{"type": "text", "text": part["text"]} for part in content]


def _max_tokens(body: dict[str, Any]) -> int | None:
    given = {
        name: _integer(body, name, 0, low=1)
        for name in ("max_completion_tokens", "max_tokens")
        if body.get(name) is not None
    }
    if len(set(given.values())) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ; give one of them.", code="invalid_value", param="max_tokens"
        )
    return next(iter(given.values()), None)


def _top_k(body: dict[str, Any]) -> int:
    return max(0, _integer(body, "top_k", 0, low=-1))  # vLLM writes "no limit" as -1


def _top_p(body: dict[str, Any]) -> float:
    top_p = _number(body, "top_p", 1.0, low=0.0, high=1.0)
    if top_p == 0:
        raise _wrong("top_p", "above 0 and at most 1", body["top_p"])
    return top_p


def _seed(body: dict[str, Any]) -> int | None:
    if body.get("seed") is None:
        return None
    return _integer(body, "seed", 0, low=-_SEEDS, high=2 * _SEEDS - 1) % _SEEDS


def _stop(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop")
    if stop is None:
        return []
    stops = [stop] if isinstance(stop, str) else stop
    is_fine = isinstance(stops, list) and len(stops) <= MAX_STOPS and all(isinstance(s, str) and s for s in stops)
    if not is_fine:
        raise _wrong("stop", f"a string or a list of at most {MAX_STOPS} strings, none empty", stop)
    return list(stops)


def _stop_token_ids(body: dict[str, Any]) -> list[int]:
    ids = body.get("stop_token_ids")
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise _wrong("stop_token_ids", "a list of token ids", ids)
    return sorted(set(ids))


def _integer(body: dict[str, Any], name: str, default: int, *, low: int, high: int = 2**31 - 1) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name, f"an integer of {low} or more" if high == 2**31 - 1 else "a 64-bit integer", value)
    return value


def _number(body: dict[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise _wrong(name, f"a number between {low:g} and {high:g}", value)
    return float(value)


def _boolean(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return bool(value)


def _same(value: Any, allowed: Any) -> bool:
    # Python says True == 1, JSON doesn't
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _wrong(param: str, says: str, value: Any) -> RequestError:
    kind = shown(value) if isinstance(value, str | int | float) else json_type(value)
    return RequestError(f"{param} must be {says}, not {kind}.", code="invalid_value", param=param)
