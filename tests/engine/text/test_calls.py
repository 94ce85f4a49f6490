"""Calls of tools are read out of answers whole or not at all."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.calls import Call, CallFormat, format_of, parse_calls

ONE = '{"name": "f", "arguments": {"x": "</b> ü"}}'
HERMES = f"<tool_call>\n{ONE}\n</tool_call>"


@pytest.mark.parametrize(
    ("call_format", "answer", "text", "names"),
    [
        ("hermes", HERMES, "", ["f"]),
        ("hermes", f"Let me look.\n{HERMES}\n{HERMES}", "Let me look.", ["f", "f"]),
        ("hermes", "no call", "no call", []),
        ("hermes", HERMES[:-5], HERMES[:-5], []),
        ("hermes", f"{HERMES} and more", f"{HERMES} and more", []),
        ("hermes", "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ("llama3", '{"name": "f", "parameters": {}}', "", ["f"]),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', "", ["f", "g"]),
        ("llama3", '{"name": "f", "parameters": {}} no', '{"name": "f", "parameters": {}} no', []),
        ("llama3", "Hello", "Hello", []),
        ("json", ONE, "", ["f"]),
        ("hermes", HERMES.replace('"</b> ü"', '"</tool_call>"'), "", ["f"]),
        ("hermes", HERMES.replace('"</b> ü"', "NaN"), HERMES.replace('"</b> ü"', "NaN"), []),
        ("hermes", HERMES.replace('"</b> ü"', "1e999"), HERMES.replace('"</b> ü"', "1e999"), []),
        ("hermes", HERMES.replace('"</b> ü"', "9" * 400), HERMES.replace('"</b> ü"', "9" * 400), []),
        ("hermes", "<tool_call>" + " " * 30_000, "<tool_call>" + " " * 30_000, []),
        ("hermes", "<tool_call>" * 3_000, "<tool_call>" * 3_000, []),
        ("json", "[" * 100_000, "[" * 100_000, []),
        ("json", "", "", []),
    ],
)
def test_answers_are_taken_apart(call_format: str, answer: str, text: str, names: list[str]) -> None:
    parsed = parse_calls(answer, CallFormat(call_format))
    assert (parsed.text, [call.name for call in parsed.calls]) == (text, names)


@given(st.sampled_from(CallFormat), st.text() | st.text(alphabet='<tool_ca>/{}":;name,'))
def test_no_text_breaks_the_reader_or_gets_lost(call_format: CallFormat, answer: str) -> None:
    parsed = parse_calls(answer, call_format)
    assert parsed.calls or parsed.text == answer


def test_arguments_stay_json() -> None:
    (call,) = parse_calls(HERMES, CallFormat.HERMES).calls
    assert call == Call("f", '{"x": "</b> ü"}')
    assert json.loads(call.arguments) == {"x": "</b> ü"}


def test_half_a_character_in_an_argument_is_replaced_as_broken_text_is() -> None:
    (call,) = parse_calls(HERMES.replace("ü", "\\ud800"), CallFormat.HERMES).calls
    assert json.loads(call.arguments) == {"x": "</b> \N{REPLACEMENT CHARACTER}"}
    assert orjson.loads(orjson.dumps(call.arguments)) == call.arguments
    named = HERMES.replace('"f"', '"f\\ud800"')
    assert parse_calls(named, CallFormat.HERMES) == (named, ())


def test_templates_tell_their_format() -> None:
    assert format_of("… return a json object within <tool_call></tool_call> XML tags") is CallFormat.HERMES
    llama = (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. tools'
    )
    assert format_of(llama) is CallFormat.LLAMA3
    assert format_of("{{ messages }}") is None
