"""The body of a chat completion: what of it the engine runs, and what of it costs the line.

`parse_chat` checks a body and gives its messages and its sampling parameters, `fit` decides `max_tokens` once the
prompt's length is known. A feature that isn't supported is refused by name, never dropped silently: an answer without
it would look like an answer with it. Fields that change nothing about the answer are ignored; one that nobody knows is
taken for a mistake. All refusals are RequestErrors, which cost this line alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from batchsvc.batches import sampling_body
from batchsvc.batches.body_values import allow, service_tier, wrong
from batchsvc.batches.rendering import EFFORTS
from batchsvc.batches.sampling_body import parse_max_tokens, parse_sampling, sampling_params
from batchsvc.batches.structure_body import FIELDS, parse_form
from batchsvc.batches.tools_body import ToolUse, parse_message_calls, parse_tools
from batchsvc.files.lines import shown
from engine.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")

_KNOWN = frozenset(
    {
        *(*sampling_body.KNOWN, *FIELDS, "messages", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "chat_template_kwargs"),
    }
)
# field -> values that ask for nothing special; null always does
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **sampling_body.HARMLESS,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "enable_thinking": (),  # chat_template_kwargs has it
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "max_output_tokens": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "return_prompt_text": (False,),
    "stop_sequences": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

# forms are large and compiled already; how calls are read out of an answer is nothing to the engine
_CHECKED_BEFORE = ("grammar", "calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A checked body. `params` is what a unit row carries, all but `max_tokens`; `max_tokens` None: not given. What
    only the model's template can settle (batches/rendering.py) is in `tools`, `reasoning_effort`, `template_kwargs`."""

    messages: list[dict[str, Any]]
    params: dict[str, Any]
    max_tokens: int | None
    tools: ToolUse | None = None
    reasoning_effort: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def asks_nothing_special(self) -> bool:
        """Whether any chat template will do."""
        is_plain = self.tools is None and self.reasoning_effort is None and not self.template_kwargs
        return is_plain and not any("tool_calls" in message or message["role"] == "tool" for message in self.messages)


def parse_chat(body: dict[str, Any]) -> ChatCall:
    """What a body asks for. Raises RequestError with the code and param of OpenAI's error body."""
    allow(body, _KNOWN, _HARMLESS)
    form, tools = parse_form(body), parse_tools(body)
    if form and tools is not None:
        says = "An answer that may call tools can't have a form of its own too; give one of the two."
        raise RequestError(says, code="unsupported_parameter", param="tools")
    if body.get("prompt_cache_key") is not None and not isinstance(body["prompt_cache_key"], str):
        raise wrong("prompt_cache_key", "a string", body["prompt_cache_key"])
    return ChatCall(
        messages=_messages(body),
        max_tokens=parse_max_tokens(body),
        params=parse_sampling(body) | service_tier(body) | ({"grammar": form} if form else {}),
        tools=tools,
        reasoning_effort=_effort(body),
        template_kwargs=_template_kwargs(body),
    )


def fit(
    call: ChatCall,
    *,
    prompt_tokens: int,
    context_tokens: int,
    default_max_tokens: int,
    vocab_size: int | None = None,
) -> dict[str, Any]:
    """`call.params` with the `max_tokens` that the line runs with. Raises RequestError when it can't run.

    A `max_tokens` that is given is kept or refused; one that is missing takes what the context leaves.
    """
    if vocab_size is not None:
        sampling_body.check_bias(call.params, vocab_size)
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
    _check_sampling(orjson.dumps({name: value for name, value in params.items() if name not in _CHECKED_BEFORE}))
    return params


@lru_cache(maxsize=4096)
def _check_sampling(params_json: bytes) -> None:
    params = orjson.loads(params_json)
    sampling_params(params, params["seed"] or 0)


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
    for name in ("function_call", "audio"):
        if message.get(name):
            raise RequestError(
                f"{where}.{name} is not supported here.", code="unsupported_parameter", param=f"{where}.{name}"
            )
    # templates know system; developer is its later name
    role = "system" if role == "developer" else role
    calls = parse_message_calls(message, where)
    content = message.get("content")
    made: dict[str, Any] = {"role": role}
    made["content"] = "" if calls and content is None else _content(content, f"{where}.content")
    if calls:
        made["tool_calls"] = calls
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise wrong(f"{where}.tool_call_id", "the id of the call that it answers", message.get("tool_call_id"))
        made["tool_call_id"] = message["tool_call_id"]
    return made


def _effort(body: dict[str, Any]) -> str | None:
    effort = body.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise wrong("reasoning_effort", f"one of {', '.join(EFFORTS)}", effort)
    return None if effort is None else str(effort)


def _template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise wrong("chat_template_kwargs", "an object", kwargs)
    return kwargs or {}


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
