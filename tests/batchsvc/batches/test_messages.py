"""Messages as chats and back: what is translated, what is refused by name, and whose tokens are counted where."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import message_results, part_file
from batchsvc.batches.message_body import parse_message
from engine.errors import RequestError

PARAMS: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def refused(**changes: Any) -> RequestError:
    with pytest.raises(RequestError) as error:
        parse_message({**PARAMS, **changes})
    return error.value


def test_params_become_a_chat() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    call = parse_message(
        {
            **PARAMS,
            "system": blocks,
            "messages": [
                {"role": "user", "content": blocks},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "y"},
            ],
            "stop_sequences": ["END"],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "stream": False,
        }
    )
    plain = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [(message["role"], message["content"]) for message in call.messages] == [
        ("system", plain),
        ("user", plain),
        ("assistant", "x"),
        ("user", "y"),
    ]
    assert call.chat.max_tokens == 9
    wanted = {"stop": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 7}
    assert {name: call.chat.params[name] for name in wanted} == wanted


TOOL = {"name": "weigh", "description": "d", "input_schema": {"type": "object", "properties": {"n": {"type": "null"}}}}


def test_tools_and_their_calls_become_those_of_a_chat() -> None:
    asked = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "toolu_1", "name": "weigh", "input": {"n": None}},
                {"type": "tool_use", "id": "toolu_2", "name": "weigh", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "8"}]},
                {"type": "text", "text": "go on"},
            ],
        },
    ]
    one = {"type": "tool", "name": "weigh", "disable_parallel_tool_use": True}
    chat = parse_message({**PARAMS, "messages": asked, "tools": [TOOL], "tool_choice": one}).chat
    assert chat.tools is not None and (chat.tools.must_call, chat.tools.max_calls) == (("weigh",), 1)
    function = {"name": "weigh", "description": "d", "parameters": TOOL["input_schema"]}
    assert chat.tools.tools == [{"type": "function", "function": function}]
    calls = [
        {"id": f"toolu_{number}", "type": "function", "function": {"name": "weigh", "arguments": arguments}}
        for number, arguments in ((1, {"n": None}), (2, {}))
    ]
    assert chat.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "text", "text": "t"}], "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "7"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": [{"type": "text", "text": "8"}]},
        {"role": "user", "content": [{"type": "text", "text": "go on"}]},
    ]
    for kind, must_call in (("auto", ()), ("any", ("weigh",))):
        tools = parse_message({**PARAMS, "tools": [TOOL], "tool_choice": {"type": kind}}).chat.tools
        assert tools is not None and tools.must_call == must_call
    assert parse_message({**PARAMS, "tools": [TOOL], "tool_choice": {"type": "none"}}).chat.tools is None


def test_a_form_is_that_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    call = parse_message({**PARAMS, "output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert "grammar" in call.chat.params


def said_by(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, {"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stream": True}, "stream"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{**TOOL, "name": "f f"}]}, "tools.0.name"),
        ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools.0"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            said_by({"type": "tool_use", "id": "a", "name": "f", "input": 1}, role="assistant"),
            "messages.0.content.0.input",
        ),
        (said_by({"type": "tool_result", "content": ""}), "messages.0.content.0.tool_use_id"),
        (said_by({"type": "tool_result", "tool_use_id": "a", "is_error": True}), "messages.0.content.0"),
        (said_by({"type": "tool_use", "id": "a", "name": "f", "input": {}}), "messages.0.content.0"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "max"}}, "output_config.effort"),
        ({"output_config": {"task_budget": 1}}, "output_config"),
        ({"surprise": 1}, "surprise"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"top_k": "many"}, "top_k"),
        ({"system": 1}, "system"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The"}]}, "messages"),
    ],
)
def test_what_can_not_be_run_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    error = refused(**changes)
    assert error.param == param and param.split(".")[0] in str(error)


def row(line_no: int, **changes: Any) -> bytes:
    arguments = {"batch_id": "b", "line_no": line_no, "custom_id": f"c{line_no}", "code": "x", "message": "says"}
    return part_file.error_row(**{**arguments, **changes})


def test_every_line_becomes_one_result_in_the_order_of_the_requests() -> None:
    error = [
        row(1, code="context_length_exceeded", status=400),
        row(3, code="batch_cancelled"),
        row(4, code="batch_expired"),
        row(5, code="unit_unreadable"),
        row(6, code="engine_error", status=500),
        row(7, code="missing_required_parameter"),
        row(8, code="budget_exceeded"),
    ]
    output = [orjson.dumps({**orjson.loads(row(2)), "response": {"status_code": 200, "body": chat(10, 4, 3)}})]
    lines = [orjson.loads(line) for line in message_results.results(output, error)]
    assert [line["custom_id"] for line in lines] == [f"c{number}" for number in range(1, 9)]
    kinds = ["errored", "succeeded", "canceled", "expired", *["errored"] * 4]
    assert [line["result"]["type"] for line in lines] == kinds
    errors = [line["result"]["error"]["error"] for line in lines if line["result"]["type"] == "errored"]
    kinds = ["invalid_request_error", "api_error", "api_error", "invalid_request_error", "billing_error"]
    assert [error["type"] for error in errors] == kinds
    assert {error["message"] for error in errors} == {"says"}


def chat(prompt: int, cached: int, output: int, **choice: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [{"message": {"content": "yes"}, "finish_reason": "length", **choice}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "cost_nanos": 5,
        },
    }


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_token_is_counted_twice_or_lost(computed: int, cached: int, output: int) -> None:
    message = message_results.message_of(chat(computed + cached, cached, output))
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (
        computed,
        cached,
        output,
    )
    assert message["stop_reason"] == "max_tokens" and message["content"] == [{"type": "text", "text": "yes"}]


CALL = {"id": "call_1", "type": "function", "function": {"name": "weigh", "arguments": '{"n": null}'}}


@pytest.mark.parametrize(
    ("choice", "stop_reason", "stop_sequence"),
    [
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "tool_calls", "message": {"content": None, "tool_calls": [CALL]}}, "tool_use", None),
    ],
)
def test_a_message_says_what_ended_it(choice: dict[str, Any], stop_reason: str, stop_sequence: str | None) -> None:
    shown = message_results.message_of({**chat(1, 0, 1, **choice), "system_fingerprint": "fp_1"})
    found = Message.model_validate(shown)
    assert (found.stop_reason, found.stop_sequence) == (stop_reason, stop_sequence)
    assert shown["system_fingerprint"] == "fp_1"
    if stop_reason == "tool_use":
        (block,) = found.content
        assert block.type == "tool_use"
        assert (block.id, block.name, block.input) == ("toolu_1", "weigh", {"n": None})
