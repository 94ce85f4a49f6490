"""What a result line says, as the columns that a table of results gets. Pure.

`answer` is the text of the (first) choice; rows that became vectors have `embedding` instead. With a schema, each of
its properties is a column: text, whole numbers, numbers and booleans as such, all else as JSON; an answer that isn't
the object asked for has none of them, and says so in `error`, as an answer does that was cut off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import orjson

Kind = Literal["text", "integer", "number", "boolean", "json", "vector"]
_KINDS: dict[str, Kind] = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class Column:
    """A column that is added to a table."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Asked:
    """The properties that a schema names, in its order; none without a schema. `is_vector`: an answer is a vector."""

    properties: tuple[Column, ...] = ()
    has_schema: bool = False
    is_vector: bool = False

    @classmethod
    def of(cls, schema: dict[str, Any] | None, *, is_vector: bool = False) -> Asked:
        """What a JSON schema asks for."""
        properties = (schema or {}).get("properties")
        found = properties.items() if isinstance(properties, dict) else ()
        return cls(tuple(Column(name, _kind(about)) for name, about in found), schema is not None, is_vector)

    def columns(self, taken: Iterable[str]) -> list[Column]:
        """All columns that are added; one whose name is taken has a suffix."""
        used, named = set(taken), []
        tokens = [Column(f"{kind}_tokens", "integer") for kind in ("input", "cached", "output")]
        last = [*tokens, Column("cost_nanos", "integer"), Column("error", "text")]
        answer = Column("embedding", "vector") if self.is_vector else Column("answer", "text")
        for column in [answer, *self.properties, *last]:
            name, number = column.name, 1
            while name in used:
                number += 1
                name = f"{column.name}_{number}"
            used.add(name)
            named.append(Column(name, column.kind))
        return named

    def values(self, row: dict[str, Any] | None) -> list[Any]:
        """The values of these columns for a result line; None: there is none for this row."""
        if row is None:
            return self._nothing("no_result: the results hold no line for this row")
        response = row.get("response") or {}
        body = response.get("body") or {}
        problem = row.get("error") or body.get("error")
        if problem:
            return self._nothing(": ".join(str(problem[key]) for key in ("code", "message") if problem.get(key)))
        if self.is_vector:
            vectors = _vectors_of(body)
            is_one = len(vectors) == 1 and isinstance(vectors[0], list)
            shown: Any = vectors[0] if is_one else None
            says = None if is_one else "invalid_answer: it is not one vector of numbers; see the result lines"
            fields, error = [None] * len(self.properties), says
        else:
            shown, finish_reason = _answer_of(body)
            fields, error = self._parsed(shown, finish_reason)
        usage = body.get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        tokens = [
            usage.get("prompt_tokens", usage.get("input_tokens")),
            details.get("cached_tokens"),
            usage.get("completion_tokens", usage.get("output_tokens")),
        ]
        return [shown, *fields, *tokens, usage.get("cost_nanos"), error]

    def _parsed(self, answer: str | None, finish_reason: str | None) -> tuple[list[Any], str | None]:
        nothing = [None] * len(self.properties)
        if not self.has_schema:
            return nothing, None
        try:
            found = orjson.loads(answer or "")
        except orjson.JSONDecodeError:
            is_cut = finish_reason == "length"
            why = "max_tokens cut the answer off" if is_cut else "the answer is not JSON"
            return nothing, f"invalid_answer: {why}"
        if not isinstance(found, dict):
            return (nothing, "invalid_answer: the answer is not a JSON object") if self.properties else (nothing, None)
        return [_fitted(found.get(column.name), column.kind) for column in self.properties], None

    def _nothing(self, error: str) -> list[Any]:
        return [None] * (5 + len(self.properties)) + [error]


def _kind(about: Any) -> Kind:
    kind = about.get("type") if isinstance(about, dict) else None
    if isinstance(kind, list):  # such as ["string", "null"]
        kind = next(iter(set(kind) - {"null"}), None) if len(set(kind) - {"null"}) == 1 else None
    return _KINDS.get(kind, "json") if isinstance(kind, str) else "json"


def _fitted(value: Any, kind: Kind) -> Any:
    """A value as its column holds it; one of another type than the schema says is none."""
    match kind, value:
        case _, None:
            return None
        case "json", _:
            return orjson.dumps(value).decode()
        case ("text", str()) | ("boolean", bool()):
            return value
        case ("integer", int()) if not isinstance(value, bool) and value in _INT64:
            return value
        case ("number", int() | float()) if not isinstance(value, bool):
            return float(value)
        case _:
            return None


def _answer_of(body: dict[str, Any]) -> tuple[str | None, str | None]:
    """The text of any endpoint's answer (of vectors and calls, their JSON), and why it ended."""
    if body.get("object") == "response":
        parts = [part for item in body.get("output") or [] for part in item.get("content") or []]
        why = "length" if body.get("status") == "incomplete" else "stop"
        return "".join(part.get("text") or "" for part in parts), why
    if body.get("object") == "list":
        vectors = _vectors_of(body)
        return orjson.dumps(vectors[0] if len(vectors) == 1 else vectors).decode(), None
    choice = (body.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    answer = message.get("content") or choice.get("text")
    if answer is None and message.get("tool_calls"):
        answer = orjson.dumps(message["tool_calls"]).decode()
    return answer, choice.get("finish_reason")


def _vectors_of(body: dict[str, Any]) -> list[Any]:
    return [item.get("embedding") for item in body.get("data") or []]
