"""How models write the calls of tools, and what their answers call: pure, one format a chat template.

hermes   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, any number, after text or none
llama3   {"name": …, "parameters": {…}}, several separated by ;
json     {"name": …, "arguments": {…}}, for models whose template knows no tools and whose answer is held to this
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any, NamedTuple

_HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class CallFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3 = "llama3"
    JSON = "json"


class Call(NamedTuple):
    """A call of one tool; `arguments` is JSON text."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """An answer taken apart: the text beside its calls, and the calls. Without calls the text is the whole answer."""

    text: str
    calls: tuple[Call, ...]


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template teaches its model; None: none that we can read."""
    if "<tool_call>" in template:
        return CallFormat.HERMES
    if "tools" in template and '"parameters": dictionary of argument name' in template:
        return CallFormat.LLAMA3
    if "ipython" in template and '"parameters"' in template:
        return CallFormat.LLAMA3
    return None


def parse_calls(answer: str, call_format: CallFormat) -> Parsed:
    """The calls of an answer. One that holds anything that isn't a whole call is all text."""
    if call_format is CallFormat.HERMES:
        first = answer.find("<tool_call>")
        if first < 0 or _HERMES_CALL.sub("", answer[first:]).strip():
            return Parsed(answer, ())
        calls = [_call(text, "arguments") for text in _HERMES_CALL.findall(answer)]
        before = answer[:first].strip()
    else:
        calls, before = _plain_calls(answer, "parameters" if call_format is CallFormat.LLAMA3 else "arguments"), ""
    known = tuple(call for call in calls if call is not None)
    return Parsed(before, known) if known and len(known) == len(calls) else Parsed(answer, ())


def _plain_calls(answer: str, key: str) -> list[Call | None]:
    calls: list[Call | None] = []
    rest = answer.strip()
    decoder = json.JSONDecoder()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return [None]
        calls.append(_as_call(value, key))
        rest = rest[end:].strip()
        if rest and not rest.startswith(";"):
            return [None]
        rest = rest[1:].strip()
    return calls


def _call(text: str, key: str) -> Call | None:
    try:
        return _as_call(json.loads(text), key)
    except (ValueError, RecursionError):
        return None


def _as_call(value: Any, key: str) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(key), dict):
        return None
    return Call(value["name"], json.dumps(value[key], ensure_ascii=False))
