"""The form that a body asks its answer to have: OpenAI's response_format, and vLLM's structured_outputs and guided_*.

Each is turned into one spec (engine/structure/grammar.py) and compiled here once, so that a form that can't be followed
is refused before its line runs. A form is followed token by token whether `strict` is given or not. With `strict`, an
object that lists its properties and doesn't speak of others has no others: OpenAI demands that such a schema says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from batchsvc.batches.body_values import wrong
from engine.errors import RequestError
from engine.structure.grammar import GrammarError, reason_against, spec_of

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOTHING: dict[str, Any] = {"response_format": {"type": "text"}, "structured_outputs": {}}
_MAX_CHOICES = 10_000
_COMBINED = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "additionalProperties", "unevaluatedProperties"}


def parse_form(body: dict[str, Any]) -> str:
    """The spec of the form that the answer must have; "" for any. Raises RequestError where there are two, or where it
    can't be followed."""
    asked = [(name, body[name]) for name in FIELDS if body.get(name) not in (None, _NOTHING.get(name))]
    if not asked:
        return ""
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise RequestError(f"An answer has one form; give one of {names}.", code="invalid_value", param=asked[1][0])
    name, value = asked[0]
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return _of_kind(name.removeprefix("guided_"), value, name)


def json_form(schema: Any, param: str, *, is_strict: bool) -> str:
    """The spec of answers that follow a JSON schema."""
    if not isinstance(schema, dict):
        raise wrong(param, "a JSON schema (an object)", schema)
    return checked_spec("json", closed(schema) if is_strict else schema, param)


def checked_spec(kind: str, value: Any, param: str) -> str:
    """A spec that compiles. Raises RequestError with the reason if it doesn't."""
    try:
        spec = spec_of(kind, value)
        reason = reason_against(spec)
    except GrammarError as error:
        reason = str(error)
    if reason:
        raise RequestError(f"{param} can't be followed: {reason}.", code="invalid_schema", param=param)
    return spec


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with every plain object of it closed: what follows it follows the schema as it was given, too."""
    closed_here: dict[str, Any] = {key: _closed_inside(key, value) for key, value in schema.items()}
    if "properties" in schema and not _COMBINED & schema.keys():
        closed_here["additionalProperties"] = False
    return closed_here


def _closed_inside(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
        return {name: closed(inner) if isinstance(inner, dict) else inner for name, inner in value.items()}
    if key == "items" and isinstance(value, dict):
        return closed(value)
    if key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
        return [closed(inner) if isinstance(inner, dict) else inner for inner in value]
    return value


def _response_format(value: Any) -> str:
    if not isinstance(value, dict):
        raise wrong("response_format", "an object with a type", value)
    kind = value.get("type")
    if kind == "json_object":
        return checked_spec("json", {"type": "object"}, "response_format")
    if kind != "json_schema":
        raise wrong("response_format.type", "text, json_object or json_schema", kind)
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise wrong("response_format.json_schema", "an object with name and schema", described)
    return json_schema_form(described, "response_format.json_schema")


def json_schema_form(described: dict[str, Any], where: str) -> str:
    """The form that OpenAI's object of name, schema and strict describes; `where` is its place in the body."""
    name, strict = described.get("name"), described.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(f"{where}.name", "1 to 64 letters, digits, underscores or dashes", name)
    if strict is not None and not isinstance(strict, bool):
        raise wrong(f"{where}.strict", "true or false", strict)
    if described.get("schema") is None:
        raise RequestError(f"{where}.schema is missing.", code="missing_required_parameter", param=f"{where}.schema")
    return json_form(described["schema"], f"{where}.schema", is_strict=strict is True)


def _structured_outputs(value: Any) -> str:
    if not isinstance(value, dict):
        raise wrong("structured_outputs", "an object with one of json, regex, choice, grammar or json_object", value)
    asked = [(kind, inner) for kind, inner in value.items() if inner is not None and inner is not False]
    if len(asked) != 1 or asked[0][0] not in (*_KINDS, "json_object"):
        raise wrong("structured_outputs", "an object with one of json, regex, choice, grammar or json_object", value)
    kind, inner = asked[0]
    if kind == "json_object":
        return checked_spec("json", {"type": "object"}, "structured_outputs.json_object")
    return _of_kind(kind, inner, f"structured_outputs.{kind}")


def _of_kind(kind: str, value: Any, param: str) -> str:
    return _KINDS[kind](value, param)


def _json(value: Any, param: str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise wrong(param, "a JSON schema, as an object or as its text", value) from None
    return json_form(value, param, is_strict=False)


def _text(kind: str) -> Callable[[Any, str], str]:
    def parse(value: Any, param: str) -> str:
        if not isinstance(value, str) or not value:
            raise wrong(param, "a string that isn't empty", value)
        return checked_spec(kind, value, param)

    return parse


def _choice(value: Any, param: str) -> str:
    is_fine = isinstance(value, list) and 0 < len(value) <= _MAX_CHOICES
    if not is_fine or not all(isinstance(text, str) and text for text in value):
        raise wrong(param, f"a list of 1 to {_MAX_CHOICES} strings, none empty", value)
    return checked_spec("choice", value, param)


_KINDS: dict[str, Callable[[Any, str], str]] = {
    "json": _json,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("grammar"),
}
