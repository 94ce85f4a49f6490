"""Forms are compiled in bounded time, whatever they say, and what can't be compiled has a reason."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.structure.grammar import MAX_SPEC_CHARS, GrammarError, reason_against, spec_of
from tests.schemas import random_schema


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, tuple[str, Any]] = {
    "ref to an address": ("json", {"$ref": "http://127.0.0.1:9/schema.json"}),
    "ref to a file": ("json", {"$ref": "file:///etc/passwd"}),
    "ref to nothing": ("json", {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}),
    "unsupported keyword": ("json", {"type": "array", "uniqueItems": True}),
    "lenient by its own word": ("json", {"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
    "no such type": ("json", {"type": "objekt"}),
    "can't be satisfied": ("json", {"type": "integer", "minimum": 5, "maximum": 4}),
    "look-ahead": ("regex", "(?=a)b"),
    "broken regex": ("regex", "(a"),
    "broken grammar": ("grammar", "start: nothing"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_can_not_be_followed_has_a_reason_on_one_line(name: str) -> None:
    reason = reason_against(spec_of(*HOSTILE[name]))
    assert reason and "\n" not in reason and len(reason) <= 300


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (
            "json",
            {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"a{i}+"} for i in range(2000)}},
        ),
        ("json", {"enum": [f"value number {i}" for i in range(5000)]}),
        ("json", {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}),
        ("json", {"type": "string", "pattern": "(a|aa|aaa)*b" * 500}),
        ("json", {"type": "array", "minItems": 10**8, "items": {"type": "object"}}),
        ("json", {"anyOf": [{"type": "object", "properties": {f"k{i}": {"$ref": "#"}}} for i in range(500)]}),
        ("json", _nested(60)),
        ("regex", "(x+x+)+y"),
        ("regex", "(((a{1,1000}){1,1000}){1,1000}b?){1,1000}"),
    ],
)
def test_large_ones_end_soon_one_way_or_the_other(kind: str, value: Any) -> None:
    """Seconds are a hang here: the usual is milliseconds."""
    began = time.monotonic()
    reason = reason_against(spec_of(kind, value))
    assert time.monotonic() - began < 10
    assert isinstance(reason, str)


def test_too_large_or_too_deep_is_never_looked_at() -> None:
    with pytest.raises(GrammarError, match="levels deep"):
        spec_of("json", _nested(100_000))
    with pytest.raises(GrammarError, match=f"at most {MAX_SPEC_CHARS}"):
        spec_of("regex", "a" * MAX_SPEC_CHARS)


def test_the_order_of_properties_is_part_of_a_spec() -> None:
    a, b = {"type": "string"}, {"type": "integer"}
    first = spec_of("json", {"properties": {"a": a, "b": b}})
    assert first != spec_of("json", {"properties": {"b": b, "a": a}})
    assert list(json.loads(first)["json"]["properties"]) == ["a", "b"]


@pytest.mark.parametrize("seed", range(40))
def test_the_random_schemas_are_ones_that_can_be_followed(seed: int) -> None:
    assert reason_against(spec_of("json", random_schema(seed))) == ""


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["json", "regex", "grammar"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "$ref", "anyOf", "items", "properties", "pattern", "x-guidance"]), inner
            )
        ),
        max_leaves=12,
    ),
)
def test_no_value_at_all_breaks_the_compiler(kind: str, value: Any) -> None:
    assert isinstance(reason_against(spec_of(kind, value)), str)
