"""The body of a chat completion: what of it the engine runs, and what of it costs the line.

`parse_chat` checks a body and gives its messages and its sampling parameters, `fit` decides `max_tokens` once the
prompt's length is known. A feature that isn't supported is refused by name, never dropped silently: an answer without
it would look like an answer with it. Fields that change nothing about the answer are ignored. All refusals are
RequestErrors, which cost this line alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from batchsvc.batches import sampling_body
from batchsvc.batches.body_values import same, wrong
from batchsvc.batches.sampling_body import parse_max_tokens, parse_sampling
from batchsvc.files.lines import shown
from engine.errors import RequestError
from engine.request import SamplingParams

ROLES = ("system", "developer", "user", "assistant")

# field -> values that ask for nothing special; null always does
_REFUSED: dict[str, tuple[Any, ...]] = {
    **sampling_body.REFUSED,
    "stream": (False,),
    "echo": (False,),
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
        if value is not None and not any(same(value, allowed) for allowed in harmless):
            raise RequestError(
                f"{name}={shown(value)} is not supported here; remove it from the body.",
                code="unsupported_parameter",
                param=name,
            )
    return ChatCall(
        messages=_messages(body),
        max_tokens=parse_max_tokens(body),
        params=parse_sampling(body),
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
        raise wrong("messages", "a list of at least one message", messages)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise wrong(where, "an object with role and content", message)
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
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
        raise wrong(where, "a string or a list of text parts", content)
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise wrong(at, "an object with a type", part)
        if kind != "text":
            raise RequestError(
                f"{at} is a part of type {shown(kind)}; the model reads text only.",
                code="unsupported_parameter",
                param=at,
            )
        if not isinstance(part.get("text"), str):
            raise wrong(f"{at}.text", "a string", part.get("text"))
    return [{"type": "text", "text": part["text"]} for part in content]
