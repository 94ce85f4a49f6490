"""Messages as chats and back: what is translated, what is refused by name, and whose tokens are counted where."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
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
    assert call.max_tokens == 9
    wanted = {"stop": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 7}
    assert {name: call.params[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stream": True}, "stream"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
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


def chat(prompt: int, cached: int, output: int) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [{"message": {"content": "yes"}, "finish_reason": "length"}],
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
