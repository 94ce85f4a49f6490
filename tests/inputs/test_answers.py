"""Inputs 16, 17 and 18 on the real engine: parameters that can't be run, logprobs, and forms that can't be followed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.batchsvc.batches.planned import jsonl, line
from tests.inputs.service import Service

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": -101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"temperature": 2.1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
]


def test_input_16_parameters_that_can_not_be_run(answering: Service) -> None:
    """Each costs its line, with a 400 that names it; nothing is dropped in silence, and three answers are three."""
    lines = [line(f"c{number}", **fields) for number, (fields, _) in enumerate(WRONG)]
    three = line("three", n=3, temperature=1, seed=1, logprobs=True, top_logprobs=2, ignore_eos=True, stop=list("abcd"))
    ended = answering.run(jsonl(*lines, line("good"), three))
    params = {number: param for number, (_, param) in ended.refusals.items()}
    assert params == {number: param for number, (_, param) in enumerate(WRONG, start=1)}
    assert set(ended.texts) == {"good", "three"}
    body = ended.answers[len(WRONG) + 2]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    tokens = sum(len(choice["logprobs"]["content"]) for choice in body["choices"])
    assert body["usage"]["completion_tokens"] >= 3 and tokens <= body["usage"]["completion_tokens"]
    alone = answering.run(jsonl(three | {"body": three["body"] | {"n": 1, "stop": None}}))
    once = alone.answers[1]["usage"]
    more = answering.run(jsonl(three | {"body": three["body"] | {"stop": None}})).answers[1]["usage"]
    assert (more["prompt_tokens"], more["completion_tokens"]) == (once["prompt_tokens"], 3 * once["completion_tokens"])
    assert more["cost_nanos"] > once["cost_nanos"]


def test_input_17_tokens_that_may_not_come(answering: Service) -> None:
    """Logprobs are those of the model, not of what a mask has left of it: all are numbers, also for greedy lines."""
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": [True, False]}}}
    asked = {"logprobs": True, "top_logprobs": 20, "response_format": form, "logit_bias": {"5": -100}}
    ended = answering.run(jsonl(line("a", **asked), line("b", **asked, temperature=1, seed=1)))
    for body in ended.answers.values():
        (choice,) = body["choices"]
        assert json.loads(choice["message"]["content"]) in (True, False)
        for token in choice["logprobs"]["content"]:
            assert all(-9999.0 <= one["logprob"] <= 0 for one in [token, *token["top_logprobs"]])


TREE = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


def formed(custom_id: str, schema: Any, **body: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    return line(custom_id, response_format=form, max_tokens=200, **body)


def test_input_18_forms_that_can_not_be_followed(answering: Service) -> None:
    """Refused in planning, by name; what can be followed is, or its answer says that it is too short."""
    huge = {"enum": [f"{number:040}" for number in range(22_000)]}
    assert 1 << 19 < len(json.dumps(huge)) < 1 << 20
    lines = [
        formed("unsupported", {"type": "object", "not": {"required": ["a"]}}),
        formed("elsewhere", {"$ref": "https://example.com/schema.json"}),
        formed("pattern", {"type": "string", "pattern": "("}),
        formed("look", {"type": "string", "pattern": "(?=a)b"}),
        formed("huge", huge),
        line("regex", guided_regex="[a-"),
        formed("cut", {"type": "string", "minLength": 100}) | {},
        formed("tree", TREE, temperature=0.5, seed=3),
        line("plain"),
    ]
    lines[6]["body"]["max_tokens"] = 5
    ended = answering.run(jsonl(*lines))
    schema = "response_format.json_schema.schema"
    want = dict.fromkeys(range(1, 6), ("invalid_schema", schema)) | {6: ("invalid_schema", "guided_regex")}
    assert ended.refusals == want
    assert ended.answers[7]["choices"][0]["finish_reason"] == "length"
    choice = ended.answers[8]["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), TREE)
    else:
        assert choice["finish_reason"] == "length"
    assert ended.answers[9]["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("max_tokens", [1, 3, 200])
def test_input_18_a_form_that_has_no_room(answering: Service, max_tokens: int) -> None:
    """An answer that was cut says so; one that says `stop` is whole."""
    body = formed("a", {"enum": ["yes", "no"]})
    body["body"]["max_tokens"] = max_tokens
    (choice,) = answering.run(jsonl(body)).answers[1]["choices"]
    if choice["finish_reason"] == "stop":
        assert json.loads(choice["message"]["content"]) in ("yes", "no")
    else:
        assert (choice["finish_reason"], max_tokens < 200) == ("length", True)
