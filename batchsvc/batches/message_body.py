"""The params of a message as Anthropic's clients write them, as the chat that they mean. Pure.

What a chat has no word for is refused by name, which costs that request alone. `cache_control` changes nothing here:
common beginnings are found without it. `metadata` and `service_tier` don't change the answer either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from batchsvc.batches import message_tools
from batchsvc.batches.body import ChatCall, parse_chat
from batchsvc.batches.line_prompt import ChatLine, LinePrompt, renamed
from batchsvc.files.lines import json_type, shown
from engine.errors import RequestError
from engine.text import TextModel

MESSAGES = "/v1/messages"
_KNOWN = {
    *("model", "messages", "system", "max_tokens", "stop_sequences", "temperature", "top_p", "top_k"),
    *("tools", "tool_choice", "output_config"),
}
_IGNORED = {"metadata", "service_tier", "cache_control", "inference_geo"}
# values that ask for nothing special; null always does
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "thinking": ({"type": "disabled"},),
    "speed": ("standard",),
    "mcp_servers": ([],),
}
# the chat's parameters that are called otherwise here
_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(\.parameters)?")
_ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class MessageCall:
    """Checked params: the chat that they mean, whose errors speak of them."""

    chat: ChatCall

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.chat.messages

    def prepare(self, text: TextModel) -> tuple[ChatLine, LinePrompt]:
        try:
            return ChatLine.of(self.chat, text)
        except RequestError as error:
            raise _in_own_words(error) from error


def parse_message(params: dict[str, Any]) -> MessageCall:
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
        **message_tools.tools_of(params),
        **_output_config(params.get("output_config")),
    }
    try:
        return MessageCall(parse_chat(chat))
    except RequestError as error:
        raise _in_own_words(error) from error


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None or system in ("", []):
        return []
    return [{"role": "system", "content": _content(system, "system")}]


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list of at least one message", messages)
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if not isinstance(message, dict):
            raise _wrong(where, "an object with role and content", message)
        role = message.get("role")
        if role not in _ROLES:
            raise _wrong(f"{where}.role", "user or assistant (a system prompt is the parameter system)", role)
        chat += _of_message(role, message.get("content"), f"{where}.content")
    if chat[-1]["role"] == "assistant":
        raise RequestError(
            "messages: the last one is the assistant's, and continuing it (prefill) is not supported here: "
            "end with a message of the user.",
            code="unsupported_parameter",
            param="messages",
        )
    return chat


def _of_message(role: str, content: Any, where: str) -> Iterator[dict[str, Any]]:
    """The messages of a chat that one message means."""
    kinds = [message_tools.kind_of(block) for block in content] if isinstance(content, list) else []
    if role == "assistant" and "tool_use" in kinds:
        yield message_tools.assistant_message(content, where)
    elif role == "user" and "tool_result" in kinds:
        yield from message_tools.user_messages(content, where)
    else:
        yield {"role": role, "content": _content(content, where)}


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong(where, "a string or a list of text blocks", content)
    return [message_tools.text_of(block, f"{where}.{index}") for index, block in enumerate(content)]


def _output_config(config: Any) -> dict[str, Any]:
    """The form and the effort that an answer is asked for."""
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise _wrong("output_config", "an object with format or effort", config)
    for name in sorted(config.keys() - {"format", "effort"}):
        raise RequestError(
            f"output_config.{shown(name)[1:-1]}: it is not supported here; remove it.",
            code="unsupported_parameter",
            param="output_config",
        )
    form, asked = config.get("format"), {"reasoning_effort": config.get("effort")}
    if form is None:
        return asked
    if message_tools.kind_of(form) != "json_schema" or not isinstance(form.get("schema"), dict):
        raise _wrong("output_config.format", "an object of type json_schema with a schema", form)
    described = {"name": "answer", "schema": form["schema"], "strict": True}
    return {**asked, "response_format": {"type": "json_schema", "json_schema": described}}


def _in_own_words(error: RequestError) -> RequestError:
    """An error of the chat in the words of these params."""
    own = renamed(error, _NAMES)

    def spelled(text: str) -> str:
        return _TOOL.sub(lambda found: f"tools.{found[1]}" + (".input_schema" if found[2] else ""), text)

    says = spelled(str(own)).replace('tool_choice "required"', "tool_choice any")
    return RequestError(says, code=own.code, param=spelled(own.param) if own.param else None)


def _wrong(param: str, says: str, value: Any) -> RequestError:
    kind = shown(value) if isinstance(value, str | int | float) else json_type(value)
    return RequestError(f"{param}: it must be {says}, not {kind}.", code="invalid_value", param=param)
