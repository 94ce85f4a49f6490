"""Tools: what is asked of the model is rendered or enforced, and what it can't do costs the line by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from batchsvc.batches.body import ChatCall, parse_chat
from batchsvc.batches.rendering import render_chat
from engine.errors import RequestError
from engine.text import ChatTemplate, TextModel, load_text
from tests.tiny import CHAT_TEMPLATE, make_tiny_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
HERMES = (
    "{% if tools %}{{ tools | tojson }}Answer with <tool_call>{name, arguments}</tool_call>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}"
    "{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(make_tiny_model(tmp_path_factory.mktemp("tools") / "tiny", chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def hermes(plain: TextModel) -> TextModel:
    return replace(plain, template=ChatTemplate(HERMES))


def parse(**fields: Any) -> ChatCall:
    return parse_chat({"messages": [{"role": "user", "content": "Rain?"}], **fields})


def test_tools_are_rendered_and_their_calls_are_read(hermes: TextModel) -> None:
    call, text = render_chat(parse(tools=[WEATHER, NOW]), hermes)
    assert "get_weather" in text and '"now"' in text
    assert call.params["calls"] == "hermes" and "grammar" not in call.params


def test_tool_choice_none_tells_the_model_nothing(hermes: TextModel) -> None:
    call, text = render_chat(parse(tools=[WEATHER], tool_choice="none"), hermes)
    assert "get_weather" not in text and "calls" not in call.params


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_come_is_enforced_on_any_model(hermes: TextModel, plain: TextModel, choice: Any) -> None:
    for model, call_format in ((hermes, "hermes"), (plain, "json")):
        call, text = render_chat(parse(tools=[WEATHER, NOW], tool_choice=choice), model)
        assert call.params["calls"] == call_format
        assert "get_weather" in text
        lark = json.loads(call.params["grammar"])["lark"]
        assert ('\\"now\\"' in lark) == (choice == "required")


def test_parallel_calls_are_allowed_unless_they_are_not(hermes: TextModel) -> None:
    for fields, most in (({}, "{0,15}"), ({"parallel_tool_calls": False}, None)):
        call, _ = render_chat(parse(tools=[WEATHER], tool_choice="required", **fields), hermes)
        assert ("{0," in call.params["grammar"]) == (most is not None)


def test_tools_without_a_template_for_them_are_an_error(plain: TextModel) -> None:
    with pytest.raises(RequestError, match="required") as refused:
        render_chat(parse(tools=[WEATHER]), plain)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")


def test_a_system_message_keeps_its_place_before_the_tools(plain: TextModel) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
    _, text = render_chat(parse(tools=[WEATHER], tool_choice="required", messages=messages), plain)
    assert text.index("Be brief.") < text.index("get_weather") < text.index("Rain?")
    assert text.count("system") == 1


CALLED = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


def test_earlier_calls_and_results_are_rendered(hermes: TextModel, plain: TextModel) -> None:
    _, text = render_chat(parse(messages=CALLED), hermes)
    assert 'get_weather{"city": "Köln"}' in text and "<tool_response>sunny</tool_response>" in text
    with pytest.raises(RequestError, match="calls of tools") as refused:
        render_chat(parse(messages=CALLED), plain)
    assert refused.value.param == "messages"


def test_variables_reach_the_template_that_knows_them(hermes: TextModel, plain: TextModel) -> None:
    for fields in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": True}}):
        assert render_chat(parse(**fields), hermes)[1].endswith("<think>")
        with pytest.raises(RequestError, match="doesn't know") as refused:
            render_chat(parse(**fields), plain)
        assert refused.value.param == next(iter(fields))
    assert not render_chat(parse(reasoning_effort="none"), hermes)[1].endswith("<think>")
    assert render_chat(parse(reasoning_effort="none"), plain)[1] == render_chat(parse(), plain)[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW] * 129}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "later"}}}, "tool_choice"),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, "tools"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("arguments", ["{", "[]", '{"x": NaN}', '{"x": "\\ud800"}', '{"x":' * 2_000, {"x": 1}, 7])
def test_arguments_of_earlier_calls_are_read_as_strictly_as_the_body(arguments: Any) -> None:
    """What gets by here is rendered into a prompt, and half a character can't be tokenized."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RequestError) as refused:
        parse(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert refused.value.param == "messages[0].tool_calls[0].function.arguments"


def test_arguments_that_can_not_be_followed_name_their_tool(hermes: TextModel) -> None:
    bad = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": {"not": {}}}}}}
    with pytest.raises(RequestError, match="not") as refused:
        render_chat(parse(tools=[NOW, bad], tool_choice="required"), hermes)
    assert refused.value.param == "tools[1].function.parameters"


class Place(BaseModel):
    city: str
    zip_code: str | None
    kind: Literal["home", "work"]
    near: list[Place]


def test_tools_that_the_official_client_makes_of_classes_can_be_followed(hermes: TextModel) -> None:
    tool = openai.pydantic_function_tool(Place, name="visit")
    call, text = render_chat(parse(tools=[tool], tool_choice="required"), hermes)
    assert call.params["grammar"] and '"visit"' in text


def test_a_key_for_caches_changes_nothing() -> None:
    assert parse(prompt_cache_key="mine") == parse()
