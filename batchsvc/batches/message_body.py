"""The params of a message as Anthropic's clients write them, as the chat that they mean. Pure.

What a chat has no word for is refused by name, which costs that request alone. `cache_control` changes nothing here:
common beginnings are found without it. `metadata` and `service_tier` don't change the answer either.
"""

from __future__ import annotations

from typing import Any

from batchsvc.batches.body import ChatCall, parse_chat
from batchsvc.files.lines import json_type, shown
from engine.errors import RequestError

MESSAGES = "/v1/messages"
_KNOWN = {"model", "messages", "system", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k"}
_IGNORED = {"metadata", "service_tier", "cache_control", "inference_geo"}
# values that ask for nothing special; null always does
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "thinking": ({"type": "disabled"},),
    "speed": ("standard",),
    "mcp_servers": ([],),
}
_NAMES = {"stop": "stop_sequences"}  # of the chat's parameters that are called otherwise here
_ROLES = ("user", "assistant")


def parse_message(params: dict[str, Any]) -> ChatCall:
    """What the params ask for. Raises RequestError with the name of the parameter that can't be run."""
    for name in sorted(params.keys() - _KNOWN - _IGNORED):
        value = params[name]
        if value is not None and value not in _HARMLESS.get(name, ()):
            raise RequestError(
                f"{shown(name)[1:-1]}: it is not supported here; remove it from params.",
                code="unsupported_parameter",
                param=name,
            )
    max_tokens, temperature = params.get("max_tokens"), params.get("temperature")
    if max_tokens is None:
        raise _wrong("max_tokens", "an integer of 1 or more", None)
    if isinstance(temperature, int | float) and not 0 <= temperature <= 1:
        raise _wrong("temperature", "a number between 0 and 1", temperature)
    stop = params.get("stop_sequences")
    if stop is not None and not isinstance(stop, list):
        raise _wrong("stop_sequences", "a list of strings", stop)
    chat = {
        "messages": [*_system(params.get("system")), *_messages(params.get("messages"))],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": params.get("top_p"),
        "top_k": params.get("top_k"),
        "stop": stop,
    }
    try:
        return parse_chat(chat)
    except RequestError as error:
        own = _NAMES.get(error.param or "", error.param)
        says = str(error) if own == error.param else str(error).replace(error.param or "", own or "", 1)
        raise RequestError(says, code=error.code, param=own) from error


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None or system in ("", []):
        return []
    return [{"role": "system", "content": _content(system, "system")}]


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of at least one message", messages)
    chat = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if not isinstance(message, dict):
            raise _wrong(where, "an object with role and content", message)
        role = message.get("role")
        if role not in _ROLES:
            raise _wrong(f"{where}.role", "user or assistant (a system prompt is the parameter system)", role)
        chat.append({"role": role, "content": _content(message.get("content"), f"{where}.content")})
    if chat[-1]["role"] == "assistant":
        raise RequestError(
            "messages: the last one is the assistant's, and continuing it (prefill) is not supported here: "
            "end with a message of the user.",
            code="unsupported_parameter",
            param="messages",
        )
    return chat


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(where, "a string or a list of text blocks", content)
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise RequestError(
                f"{where}.{index}: a block of type {shown(kind)} is not supported here; the model reads text only.",
                code="unsupported_parameter",
                param=f"{where}.{index}",
            )
        if not isinstance(block.get("text"), str):
            raise _wrong(f"{where}.{index}.text", "a string", block.get("text"))
    return [{"type": "text", "text": block["text"]} for block in content]


def _wrong(param: str, says: str, value: Any) -> RequestError:
    kind = shown(value) if isinstance(value, str | int | float) else json_type(value)
    return RequestError(f"{param}: it must be {says}, not {kind}.", code="invalid_value", param=param)
