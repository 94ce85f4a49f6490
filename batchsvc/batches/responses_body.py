"""The body of a response (`/v1/responses`): text in, text out, as the chat that says the same.

`input` and `instructions` become messages, `max_output_tokens`, `text.format` and `reasoning.effort` get their names in
a chat, and the rest is read as a chat's. What needs a conversation kept on the server, tools, or other than text, is
refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchsvc.batches import sampling_body
from batchsvc.batches.body import ChatCall, parse_chat
from batchsvc.batches.body_values import allow, refuse, wrong
from batchsvc.batches.line_prompt import ChatLine, Fitting, LinePrompt, renamed
from batchsvc.batches.structure_body import FIELDS
from batchsvc.files.lines import shown
from engine.errors import RequestError
from engine.text import TextModel

ENDPOINT = "/v1/responses"
_TEXT_PARTS = ("input_text", "output_text", "text")
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}

_OTHERWISE = frozenset({"max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs", "response_format"})
_OWN = frozenset({"input", "instructions", "text", "reasoning", "max_output_tokens", "max_tool_calls"})
_KNOWN = ((sampling_body.KNOWN | set(FIELDS)) - _OTHERWISE) | _OWN | {"chat_template_kwargs"}
# field -> values that ask for nothing special; null always does
_HARMLESS: dict[str, tuple[Any, ...]] = {
    **sampling_body.HARMLESS,
    "access_programs": ([],),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "image": (),
    "include": ([],),
    "include_reasoning": (True,),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),  # of no tools
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
    "reasoning_effort": (),
    "response_format": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall:
    """A checked body. `shown` is what of it the answer repeats."""

    chat: ChatCall
    shown: dict[str, Any]
    line: ChatLine | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.chat.messages

    def prepare(self, text: TextModel) -> tuple[ResponseCall, LinePrompt]:
        try:
            line, prompt = ChatLine.of(self.chat, text)
        except RequestError as error:
            raise renamed(error, _NAMES) from error
        return replace(self, line=line), prompt

    def fit(self, lengths: Sequence[int], fitting: Fitting) -> dict[str, Any]:
        assert self.line is not None, "a call is prepared before it is fitted"
        try:
            params = self.line.fit(lengths, fitting)
        except RequestError as error:
            raise renamed(error, _NAMES) from error
        return {**params, "endpoint": ENDPOINT, "shown": self.shown}


def parse_response(body: dict[str, Any]) -> ResponseCall:
    """What a body asks for. Raises RequestError."""
    allow(body, _KNOWN, _HARMLESS)
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise wrong("instructions", "a string", instructions)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    chat = {name: value for name, value in body.items() if name in _KNOWN - _OWN}
    chat |= {"messages": [*messages, *_messages(body)], "max_completion_tokens": body.get("max_output_tokens")}
    chat |= _format(body) | _effort(body)
    try:
        call = parse_chat(chat)
    except RequestError as error:
        raise renamed(error, _NAMES) from error
    repeated = {"instructions": instructions, "max_output_tokens": call.max_tokens, "text": body.get("text")}
    return ResponseCall(chat=call, shown={name: value for name, value in repeated.items() if value is not None})


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("input")
    if given is None:
        raise RequestError("The body has no input.", code="missing_required_parameter", param="input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", "a string or a list of at least one message", given)
    return [_message(item, f"input[{index}]") for index, item in enumerate(given)]


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise wrong(where, "an object with role and content", item)
    kind = item.get("type", "message")
    if kind != "message" or item.get("role") == "tool":
        says = f"{where} is an item of type {shown(kind)}; only messages of text are supported here."
        raise RequestError(says, code="unsupported_parameter", param=where)
    return {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and isinstance(kind, str) and kind not in _TEXT_PARTS:
            says = f"{where}[{index}] is a part of type {shown(kind)}; the model reads text only."
            raise RequestError(says, code="unsupported_parameter", param=f"{where}[{index}]")
        is_text = isinstance(part, dict) and kind in _TEXT_PARTS
        parts.append({"type": "text", "text": part.get("text")} if is_text else part)
    return parts


def _format(body: dict[str, Any]) -> dict[str, Any]:
    text = _object(body, "text")
    refuse({f"text.{name}": value for name, value in text.items()}, {"text.verbosity": ("medium",)})
    form = text.get("format")
    if form is None:
        return {}
    if not isinstance(form, dict):
        raise wrong("text.format", "an object with a type", form)
    if form.get("type") != "json_schema":
        return {"response_format": form}
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _effort(body: dict[str, Any]) -> dict[str, Any]:
    reasoning = _object(body, "reasoning")
    given = {f"reasoning.{name}": value for name, value in reasoning.items() if name != "effort"}
    refuse(given, dict.fromkeys(given, ()))
    return {"reasoning_effort": reasoning["effort"]} if reasoning.get("effort") is not None else {}


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value or {}
