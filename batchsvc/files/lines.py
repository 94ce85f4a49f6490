"""JSONL as a stream of records: every physical line that isn't blank, parsed strictly, or the reason why not.

Lines end at byte 0x0A and nowhere else; a carriage return before it and a byte-order mark at the start of a line are
dropped. Blank lines are skipped, but line numbers stay physical. A line over the limit is never held in memory. What
the usual parsers let pass (NaN, lone surrogates, duplicate keys, deep nesting) is refused here, because two readers of
such a line may read two different requests. A number that is too large is no matter of JSON but of the field that it
stands in: the line is read, and its record names the field.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import orjson

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects in a line."""
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r"
_SHOWN_CHARS = 100
_LONGEST_PARAM = 200
_LARGEST = sys.float_info.max  # stands for a number that is larger, or as far below zero
_NUMBER = r"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?"
_STRING = (
    r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'  # one without an end reaches to the end, so that none is looked at twice
)
_TOKENS = re.compile(f"{_STRING}|{_NUMBER}".encode(), re.DOTALL)
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][\da-fA-F]{2})|\\.", re.DOTALL
)
_SIGNS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # for halves of characters, in turn: they are no characters
_HALF = re.compile(f"[{_SIGNS[0]}-{_SIGNS[-1]}]")
_NUMBER_HERE = re.compile(_NUMBER, re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a line, or with `line` None the file, can't be used. The fields are those of a batch's `errors.data`."""

    line: int | None
    code: str
    message: str
    param: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One non-blank line: `value` is its object, or {} when `problem` says why there is none.

    `line_no` is 1-based; `next_offset` is the byte where the next line starts. `note` says what was passed over in
    reading it; `flaw` is what no value can hold.
    """

    line_no: int
    next_offset: int
    value: dict[str, Any]
    problem: Problem | None = None
    note: Problem | None = None
    flaw: Flaw | None = None


class UnreadableFileError(Exception):
    """The file as a whole can't be read; no line of it can be blamed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class RawLine(NamedTuple):
    """A physical line. `data` is None when it is longer than the limit; `size` is its length in bytes."""

    line_no: int
    next_offset: int
    size: int
    data: bytes | None
    has_mark: bool = False  # a byte-order mark was dropped


class Flaw(NamedTuple):
    """What is valid JSON and yet can't be read: `path` leads to it, as `body.messages[0].x`, and `says` goes on behind
    the path. The line alone pays for it."""

    path: str
    says: str

    def within(self, outer: str) -> Flaw:
        """The same of a larger object, which has this one at `outer`."""
        return self._replace(path=f"{outer}.{self.path}")

    @property
    def message(self) -> str:
        return f"{shown(self.path)} {self.says}."

    @property
    def param(self) -> str:
        return self.path[:_LONGEST_PARAM]


class JsonObject(NamedTuple):
    """A parsed object, something else standing in the place of its `flaw`."""

    value: dict[str, Any]
    flaw: Flaw | None = None


def jsonl_records(
    chunks: Iterable[bytes], *, max_line_bytes: int, first_line: int = 1, offset: int = 0
) -> Iterator[Record]:
    """Records of a JSONL stream that starts at byte `offset` of its file, which is the start of line `first_line`."""
    for raw in split_lines(chunks, max_line_bytes=max_line_bytes, first_line=first_line, offset=offset):
        if raw.data is None:
            problem = Problem(
                line=raw.line_no,
                code="line_too_long",
                message=f"The line has {raw.size} bytes; at most {max_line_bytes} are allowed.",
            )
            yield Record(line_no=raw.line_no, next_offset=raw.next_offset, value={}, problem=problem)
            continue
        found = parse_object(raw.data, line_no=raw.line_no, code="invalid_json_line", what="The line")
        note = _mark_note(raw.line_no) if raw.has_mark and raw.line_no > 1 else None
        if isinstance(found, Problem):
            yield Record(line_no=raw.line_no, next_offset=raw.next_offset, value={}, problem=found, note=note)
        else:
            value, flaw = found
            yield Record(line_no=raw.line_no, next_offset=raw.next_offset, value=value, note=note, flaw=flaw)


def split_lines(
    chunks: Iterable[bytes], *, max_line_bytes: int, first_line: int = 1, offset: int = 0
) -> Iterator[RawLine]:
    """Non-blank physical lines without their ends. Holds one chunk and one line of at most `max_line_bytes`."""
    kept_bytes = max_line_bytes + len(_BOM) + 1  # a mark and a carriage return don't count
    line_no, start = first_line, offset
    rest = bytearray()  # the beginning of a line whose end hasn't come yet, cut at kept_bytes + 1
    rest_size = 0  # its true size
    for chunk in chunks:
        pieces = chunk.split(b"\n")
        for piece in pieces[:-1]:
            size = rest_size + len(piece)
            if rest_size:
                rest += piece[: kept_bytes + 1 - len(rest)]
                piece = bytes(rest)
                rest.clear()
                rest_size = 0
            start += size + 1
            yield from _raw_line(line_no, start, size, piece, max_line_bytes)
            line_no += 1
        rest += pieces[-1][: kept_bytes + 1 - len(rest)]
        rest_size += len(pieces[-1])
    if rest_size:
        yield from _raw_line(line_no, start + rest_size, rest_size, bytes(rest), max_line_bytes)


def _raw_line(line_no: int, next_offset: int, size: int, data: bytes, max_line_bytes: int) -> Iterator[RawLine]:
    dropped = size - len(data)  # > 0 for a line that was cut
    has_mark = data.startswith(_BOM)
    if has_mark:
        data = data[len(_BOM) :]
        size -= len(_BOM)
    if not dropped and data.endswith(b"\r"):
        data = data[:-1]
        size -= 1
    if size > max_line_bytes:
        yield RawLine(line_no, next_offset, size, None)
    elif data.strip(_BLANK):
        yield RawLine(line_no, next_offset, size, data, has_mark)


def _mark_note(line_no: int) -> Problem:
    says = "The line begins with a byte-order mark, which was dropped: files that were joined have such lines."
    return Problem(line=line_no, code="byte_order_mark", message=says)


def parse_object(data: bytes, *, line_no: int, code: str, what: str, param: str | None = None) -> JsonObject | Problem:
    """The JSON object in `data`, read as strictly as two readers must agree; else a Problem (never an exception)."""

    def problem(message: str, code: str = code) -> Problem:
        return Problem(line=line_no, code=code, message=message, param=param)

    has_flaw = False
    try:
        try:
            value = orjson.loads(data)
        except orjson.JSONDecodeError:
            has_flaw = True
            data, value = _readable(data)
    except orjson.JSONDecodeError as error:
        return problem(f"{what} is not valid JSON: {error.msg} (column {error.colno}).")
    if not isinstance(value, dict):
        return problem(f"{what} must be a JSON object, not {json_type(value)}.", "expected_object")
    if _is_deep(data, value):
        return problem(f"{what} is nested more than {MAX_DEPTH} levels deep.")
    if not _has_plain_keys(data, value):
        try:
            # numbers as text: Python refuses integers of over 4,300 digits, and their values don't matter here
            json.loads(data, object_pairs_hook=_refuse_duplicates, parse_int=str, parse_float=str)
        except _DuplicateKeyError as error:
            return problem(f"{what} has the key {shown(error.key)} twice in one object.")
    return JsonObject(value, _first_flaw(value) if has_flaw else None)


def _readable(data: bytes) -> tuple[bytes, Any]:
    """JSON whose numbers and characters can all be read, and its value: it has signs where they can't. Raises
    JSONDecodeError."""
    signs = cycle(json.dumps(sign)[1:-1].encode() for sign in _SIGNS)  # as long as what they stand for
    data = _ESCAPES.sub(lambda escape: escape[0] if escape["half"] is None else next(signs), data)
    try:
        return data, orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if not _is_too_large(_NUMBER_HERE.match(error.doc, error.pos)):
            raise
    data = _TOKENS.sub(_with_largest, data)
    return data, orjson.loads(data)


def has_half(text: str) -> bool:
    """Whether a text of an object with a flaw has the sign of half a character."""
    return _HALF.search(text) is not None


def _is_too_large(number: re.Match[str] | re.Match[bytes] | None) -> bool:
    return number is not None and abs(float(number[0])) > _LARGEST


def _with_largest(token: re.Match[bytes]) -> bytes:
    """A number or a string as it is; the largest number in place of one that no reader can hold."""
    text = token[0]
    if text.startswith(b'"') or not _is_too_large(token):
        return text
    return repr(-_LARGEST if text.startswith(b"-") else _LARGEST).encode()


def _first_flaw(value: Any, path: str = "") -> Flaw | None:
    """The first sign in a value: in a text, as a number, or in a key."""
    if isinstance(value, dict):
        for name, child in value.items():
            at = f"{path}.{name}" if path else name
            if has_half(name):
                return Flaw(_HALF.sub("\ufffd", at), "is a name with half of a character: send all of it, or none")
            if (found := _first_flaw(child, at)) is not None:
                return found
    if isinstance(value, list):
        return next((flaw for n, child in enumerate(value) if (flaw := _first_flaw(child, f"{path}[{n}]"))), None)
    if isinstance(value, float) and abs(value) == _LARGEST:
        return Flaw(path, "is a number that is too large to be read; the largest is about 1.8e308")
    if isinstance(value, str) and has_half(value):
        return Flaw(path, "has half of a character (an unpaired surrogate such as \\ud800): send all of it, or none")
    return None


class _DuplicateKeyError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    keys = set()
    for key, _ in pairs:
        if key in keys:
            raise _DuplicateKeyError(key)
        keys.add(key)


def _has_plain_keys(data: bytes, value: dict[str, Any]) -> bool:
    """Whether it is plain that no object has a key twice; it is for nearly every line, at a tenth of a second parse.

    Without blanks before colons, a key is written as `":`; so may be an end of some string, but nothing else. As many
    of these as there are distinct keys leave no room for a second of any.
    """
    if b" :" in data or b"\t:" in data or b"\r:" in data or b"\n:" in data:
        return False
    num_keys = 0
    found: list[Any] = [value]
    while found:
        item = found.pop()
        if isinstance(item, dict):
            num_keys += len(item)
            item = item.values()
        found += [child for child in item if isinstance(child, dict | list)]
    return data.count(b'":') == num_keys


def _is_deep(data: bytes, value: dict[str, Any]) -> bool:
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False  # nearly every line: too few brackets to nest so deep
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def json_type(value: Any) -> str:
    """JSON's name for the type of a value, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case _:
            return "an object"


def shown(value: Any) -> str:
    """A user's value for an error message: JSON, without control characters, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
