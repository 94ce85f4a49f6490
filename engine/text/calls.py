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

import orjson

_HALF_PAIR = re.compile("[\ud800-\udfff]")  # JSON can spell half a character, UTF-8 can't


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


class _Marks(NamedTuple):
    """What stands around a call and between two of them, and what its arguments are called."""

    opening: str
    closing: str
    between: str
    arguments: str


_MARKS = {
    CallFormat.HERMES: _Marks("<tool_call>", "</tool_call>", "", "arguments"),
    CallFormat.LLAMA3: _Marks("", "", ";", "parameters"),
    CallFormat.JSON: _Marks("", "", ";", "arguments"),
}


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
    marks = _MARKS[call_format]
    start = max(answer.find(marks.opening), 0)
    try:
        calls = _read(answer[start:].strip(), marks)
    except (ValueError, RecursionError):
        calls = ()
    return Parsed(answer[:start].strip(), calls) if calls else Parsed(answer, ())


def _read(rest: str, marks: _Marks) -> tuple[Call, ...]:
    """Call by call, each character once: what a model writes must not cost more than it is long. Raises ValueError
    where something else stands."""
    calls: list[Call] = []
    while rest:
        value, end = _DECODER.raw_decode(_after(marks.opening, rest))
        calls.append(_as_call(value, marks.arguments))
        rest = _after(marks.closing, _after(marks.opening, rest)[end:].lstrip())
        if rest:
            rest = _after(marks.between, rest)
    return tuple(calls)


def _after(mark: str, text: str) -> str:
    if not text.startswith(mark):
        raise ValueError(f"{mark} is missing")
    return text[len(mark) :].lstrip()


def _as_call(value: Any, key: str) -> Call:
    match value:
        case {"name": str(name), **rest} if isinstance(rest.get(key), dict) and not _HALF_PAIR.search(name):
            arguments = _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", json.dumps(rest[key], ensure_ascii=False))
            orjson.loads(arguments)  # raises for numbers that only Python holds
            return Call(name, arguments)
    raise ValueError("that is no call")


_DECODER = json.JSONDecoder()
