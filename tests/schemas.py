"""Random JSON schemas from a seed: recursive ones, enums, every script, numbers of all kinds."""

from __future__ import annotations

import random
from typing import Any

_WORDS = (
    "name",
    "größe",
    "цена",
    "名前",
    "a b",
    'quo"te',
    "line\nend",
    "emoji 🙂",
    "sep\u2028arator",
    "back\\slash",
    "",
)
_PATTERNS = (r"^[A-Z]{2}-\d{3}$", r"^(yes|no|ünknown)$", r"^\w{1,6}$", r"[0-9a-f]{4}")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4")


def random_schema(seed: int) -> dict[str, Any]:
    """A schema that can be satisfied; every third refers to itself."""
    rng = random.Random(seed)
    if seed % 3:
        return _object(rng, depth=3)
    node = {
        "type": "object",
        "properties": {
            "value": _any(rng, depth=1),
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": rng.choice((["value"], ["value", "next"], ["value", "children", "next"])),
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _text, _integer, _number, _enum, _const, _boolean, _null]
    if depth > 0:
        kinds += [_object, _array, _union]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    if rng.random() < 0.8:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _text(rng: random.Random, _depth: int) -> dict[str, Any]:
    more = rng.choice(
        (
            {"maxLength": rng.randint(0, 12)},
            {"minLength": 2, "maxLength": 6},
            {"pattern": rng.choice(_PATTERNS), "maxLength": 12},
            {"format": rng.choice(_FORMATS)},
        )
    )
    return {"type": "string", **more}


def _integer(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", **rng.choice(({"minimum": low, "maximum": low + rng.randint(0, 10**6)}, {}))}


def _number(rng: random.Random, _depth: int) -> dict[str, Any]:
    low = rng.uniform(-5, 5)
    return {"type": "number", **rng.choice(({"minimum": low}, {"exclusiveMinimum": low, "maximum": low + 2.5}, {}))}


def _enum(rng: random.Random, _depth: int) -> dict[str, Any]:
    values = [*rng.sample(_WORDS, 3), rng.randint(-9, 9), None, 0.5, {"k": [1, "é"]}]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _const(rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"const": rng.choice((*_WORDS, 7, True))}


def _boolean(_rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _null(_rng: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": "null"}
