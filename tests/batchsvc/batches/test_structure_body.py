"""The form of an answer: every way of asking gives one spec, what can't be followed costs the line by name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from batchsvc.batches.structure_body import closed, parse_form
from engine.errors import RequestError

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": ["z"]}


def described(**fields: Any) -> dict[str, Any]:
    made = {"name": "reply", "schema": SCHEMA, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": made}}


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "guided_json": None, "structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (described(), {"json": SCHEMA}),
        (described(strict=False, description="what it is"), {"json": SCHEMA}),
        (described(strict=True), {"json": {**SCHEMA, "additionalProperties": False}}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_json": {}}, {"json": {}}),
        ({"guided_regex": r"\d{3}"}, {"regex": r"\d{3}"}),
        ({"guided_choice": ["a", "ü"]}, {"choice": ["a", "ü"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"regex": "x+"}}, {"regex": "x+"}),
        ({"structured_outputs": {"choice": ["x"], "json": None}}, {"choice": ["x"]}),
        ({"structured_outputs": {"json_object": True}}, {"json": {"type": "object"}}),
    ],
)
def test_each_way_of_asking_gives_its_spec(body: dict[str, Any], spec: dict[str, Any] | None) -> None:
    found = parse_form(body)
    assert found == ("" if spec is None else json.dumps(spec, ensure_ascii=False, separators=(",", ":")))


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name"),
        (described(name="no spaces"), "response_format.json_schema.name", "64"),
        (described(name="n" * 65), "response_format.json_schema.name", "64"),
        (described(strict="yes"), "response_format.json_schema.strict", "true or false"),
        (described(schema=None), "response_format.json_schema.schema", "missing"),
        (described(schema=True), "response_format.json_schema.schema", "object"),
        (described(schema={"not": {}}), "response_format.json_schema.schema", "not"),
        (described(schema={"$ref": "https://example.com/s.json"}), "response_format.json_schema.schema", "example.com"),
        ({"guided_json": "{"}, "guided_json", "JSON schema"),
        ({"guided_regex": "(?=x)"}, "guided_regex", "look"),
        ({"guided_choice": []}, "guided_choice", "list"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none empty"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "one of"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one form"),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(body: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_form(body)
    assert refused.value.param == param
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_closing_a_schema_only_takes_answers_away() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {
            "in": inner,
            "list": {"type": "array", "items": inner},
            "any": {"anyOf": [inner, {"type": "null"}]},
        },
        "allOf": [{"properties": {"more": {"type": "string"}}}],
        "$defs": {"d": inner},
    }
    shut = closed(schema)
    assert "additionalProperties" not in shut, "allOf adds properties of its own"
    assert shut["allOf"] == schema["allOf"]
    assert shut["properties"]["in"]["additionalProperties"] is False
    assert shut["properties"]["list"]["items"]["additionalProperties"] is False
    assert shut["properties"]["any"]["anyOf"][0]["additionalProperties"] is False
    for value in ({"in": {"x": 1}}, {"list": [{"x": 1}]}, {"any": None, "more": "s"}):
        jsonschema.validate(value, shut)
        jsonschema.validate(value, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"in": {"y": 1}}, shut)
