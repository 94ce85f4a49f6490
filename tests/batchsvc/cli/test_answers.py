"""Columns of results: names that are taken, answers that aren't what the schema asks for, every kind of error line."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batchsvc.cli.answers import Asked, Column

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["a", "b"], "type": "string"},
        "stars": {"type": ["integer", "null"]},
        "score": {"type": "number"},
        "sure": {"type": "boolean"},
        "why": {"type": "array"},
    },
}


def row(content: str | None, *, finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}, "cost_nanos": 9}
    choice = {"message": {"content": content, **more}, "finish_reason": finish_reason}
    return {"response": {"status_code": 200, "body": {"choices": [choice], "usage": usage}}, "error": None}


def values(answer: dict[str, Any] | None, schema: dict[str, Any] | None = SCHEMA) -> dict[str, Any]:
    asked = Asked.of(schema)
    return dict(zip([column.name for column in asked.columns(())], asked.values(answer), strict=True))


def test_the_properties_of_a_schema_are_columns() -> None:
    content = json.dumps({"label": "a", "stars": 5, "score": 1, "sure": True, "why": ["x"], "more": 1})
    assert values(row(content)) == {
        "answer": content,
        "label": "a",
        "stars": 5,
        "score": 1.0,
        "sure": True,
        "why": '["x"]',
        "input_tokens": 7,
        "cached_tokens": 2,
        "output_tokens": 3,
        "cost_nanos": 9,
        "error": None,
    }


def test_values_of_another_type_are_none_and_the_answer_stays() -> None:
    content = json.dumps({"label": 1, "stars": True, "score": "1", "sure": 0, "why": None})
    found = values(row(content))
    assert [found[name] for name in ("label", "stars", "score", "sure", "why")] == [None] * 5
    assert found["answer"] == content
    assert values(row(json.dumps({"stars": 2**63})))["stars"] is None


def test_answers_that_are_no_object_say_so() -> None:
    assert values(row("well"))["error"] == "invalid_answer: the answer is not JSON"
    assert values(row('{"a', finish_reason="length"))["error"] == "invalid_answer: max_tokens cut the answer off"
    assert values(row("[1]"))["error"] == "invalid_answer: the answer is not a JSON object"
    assert values(row("well"), None)["error"] is None
    assert values(row("[1]"), {"type": "array"})["error"] is None


def test_error_lines_and_missing_lines() -> None:
    never = {"response": None, "error": {"code": "batch_expired", "message": "Too late."}}
    rejected = {"response": {"status_code": 400, "body": {"error": {"code": "x", "message": "No."}}}, "error": None}
    assert values(never)["error"] == "batch_expired: Too late."
    assert values(rejected)["error"] == "x: No."
    assert values(None)["error"].startswith("no_result")
    calls = [{"type": "function"}]
    assert values(row(None, tool_calls=calls), None)["answer"] == json.dumps(calls, separators=(",", ":"))


@given(st.lists(st.sampled_from(["answer", "answer_2", "error", "label", "stars", "id"]), unique=True))
def test_no_two_columns_have_one_name(taken: list[str]) -> None:
    schema = {"properties": {"answer": {}, "error": {}, "label": {"type": "string"}}}
    names = [column.name for column in Asked.of(schema).columns(taken)]
    assert len({*names, *taken}) == len(names) + len(taken)
    if "answer" not in taken:
        assert names[0] == "answer"


def test_a_schema_of_any_form_is_accepted() -> None:
    for schema in (
        {},
        {"properties": []},
        {"properties": {"a": True}},
        {"$ref": "#"},
        {"properties": {"a": {"type": 1}}},
    ):
        assert all(column.kind == "json" for column in Asked.of(schema).properties)
    assert Asked.of(None).properties == ()
    assert Asked.of({"properties": {"a": {"type": "string"}}}).properties == (Column("a", "text"),)
