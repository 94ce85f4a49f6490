"""Bodies: what is supported arrives in the parameters, what isn't costs the line by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import body
from engine.errors import RequestError

MESSAGES = [{"role": "user", "content": "hi"}]
DEFAULTS = {
    "min_tokens": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
}


def parse(**fields: Any) -> body.ChatCall:
    return body.parse_chat({"model": "m", "messages": MESSAGES} | fields)


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    return refused.value


def test_a_bare_body_has_openais_defaults() -> None:
    call = parse()
    assert call == body.ChatCall(messages=MESSAGES, params=DEFAULTS, max_tokens=None)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": None, "top_p": None, "seed": None, "stop": None}, {}),
        ({"top_p": 0.5, "top_k": 40}, {"top_p": 0.5, "top_k": 40}),
        ({"top_k": -1}, {}),
        ({"seed": 7}, {"seed": 7}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["a", "b", "c", "d"]}, {"stop": ["a", "b", "c", "d"]}),
        ({"stop_token_ids": [5, 2, 5]}, {"stop_token_ids": [2, 5]}),
        ({"min_tokens": 3, "ignore_eos": True}, {"min_tokens": 3, "ignore_eos": True}),
        ({"n": 128}, {"n": 128}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"logit_bias": {"7": -100, "5": 1.5, "6": 0}}, {"logit_bias": [(5, 1.5), (7, -100.0)]}),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ({"frequency_penalty": 0.5, "presence_penalty": -1}, {"frequency_penalty": 0.5, "presence_penalty": -1.0}),
    ],
)
def test_supported_parameters_arrive(fields: dict[str, Any], params: dict[str, Any]) -> None:
    assert parse(**fields).params == DEFAULTS | params


def test_fields_without_effect_are_ignored() -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "n": 1,
        "stream": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logprobs": False,
        "something_new": None,
        "add_special_tokens": False,
        "spaces_between_special_tokens": True,
        "priority": 3,
        "stream_options": {"include_usage": True},
    }
    assert parse(**harmless).params == DEFAULTS


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("something_new", "remove it from the body"),
        ("temprature", "temperature may be meant"),
        ("maxTokens", "max_tokens may be meant"),
        ("x" * 1000, "remove it"),
        ("bad\nname\ud800", "remove it"),
    ],
)
def test_what_nobody_knows_is_named(name: str, says: str) -> None:
    error = refusal(**{name: 1})
    assert error.code == "unknown_parameter" and error.param and says in str(error)
    assert len(str(error)) < 200 and "\n" not in str(error)


def test_a_tier_that_is_asked_for_is_answered() -> None:
    assert parse(service_tier="flex").params == DEFAULTS | {"service_tier": "default"}
    assert (refusal(service_tier="gold").param, refusal(service_tier=[]).code) == ("service_tier", "invalid_value")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verbosity", "low"),
        ("stream", True),
        ("functions", [{}]),
        ("best_of", 2),
        ("modalities", ["text", "audio"]),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("typical_p", 0.5),
        ("return_token_ids", True),
        ("prompt_logprobs", 1),
        ("truncate_prompt_tokens", 8),
        ("documents", [{}]),
        ("enable_thinking", True),
        ("thinking_token_budget", 5),
        ("max_output_tokens", 5),
        ("stop_sequences", ["x"]),
    ],
)
def test_unsupported_features_are_refused_by_name(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.code, error.param) == ("unsupported_parameter", name)
    assert name in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("top_logprobs", 21),
        ("top_logprobs", 5),
        ("logprobs", 3),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", [5]),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 10**30),
        ("max_tokens", "10"),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("seed", 1.5),
        ("seed", 2**64),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ["a", ""]),
        ("stop", ""),
        ("stop", 3),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
        ("messages", []),
        ("messages", "hi"),
        ("messages", {}),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.code, error.param) == ("invalid_value", name)


def test_messages_are_required() -> None:
    assert refusal(messages=None).code == "missing_required_parameter"


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("hi", "invalid_value", "messages[1]"),
        ({"content": "x"}, "invalid_value", "messages[1].role"),
        ({"role": "robot", "content": "x"}, "invalid_value", "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "invalid_value", "messages[1].role"),
        ({"role": "user"}, "invalid_value", "messages[1].content"),
        ({"role": "user", "content": 3}, "invalid_value", "messages[1].content"),
        ({"role": "user", "content": []}, "invalid_value", "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "invalid_value", "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "invalid_value", "messages[1].content[0].text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "unsupported_parameter",
            "messages[1].content[1]",
        ),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{}]},
            "invalid_value",
            "messages[1].tool_calls[0]",
        ),
    ],
)
def test_a_wrong_message_is_named(message: Any, code: str, param: str) -> None:
    error = refusal(messages=[*MESSAGES, message])
    assert (error.code, error.param) == (code, param)


def test_messages_keep_their_texts_and_lose_what_templates_need_not_see() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]
    call = parse(
        messages=[{"role": "developer", "content": "s", "name": "x"}, {"role": "user", "content": parts}],
    )
    assert call.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


def test_the_two_names_of_max_tokens_must_agree() -> None:
    assert parse(max_tokens=5).max_tokens == 5
    assert parse(max_completion_tokens=6).max_tokens == 6
    assert parse(max_completion_tokens=6, max_tokens=6).max_tokens == 6
    assert refusal(max_completion_tokens=6, max_tokens=5).param == "max_tokens"


def fit(call: body.ChatCall, prompt_tokens: int, context_tokens: int = 100) -> int:
    params = body.fit(call, prompt_tokens=prompt_tokens, context_tokens=context_tokens, default_max_tokens=30)
    return int(params["max_tokens"])


def test_max_tokens_is_clamped_only_when_it_was_not_given() -> None:
    assert fit(parse(), 10) == 30
    assert fit(parse(), 90) == 10
    assert fit(parse(max_tokens=90), 10) == 90
    with pytest.raises(RequestError) as refused:
        fit(parse(max_tokens=91), 10)
    assert refused.value.code == "context_length_exceeded"
    assert "10" in str(refused.value) and "91" in str(refused.value) and "100" in str(refused.value)


def test_a_prompt_must_leave_room_for_an_answer() -> None:
    assert fit(parse(), 99) == 1
    with pytest.raises(RequestError) as refused:
        fit(parse(), 100)
    assert refused.value.code == "context_length_exceeded"


def test_min_tokens_above_max_tokens_costs_the_line() -> None:
    with pytest.raises(RequestError) as refused:
        fit(parse(min_tokens=31), 10)
    assert refused.value.param == "min_tokens"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role"]), inner),
    max_leaves=5,
)
_FORMS = ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"]
_OTHERS = ["n", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"]
FIELDS = sorted([*DEFAULTS, "messages", "max_tokens", "max_completion_tokens", *_FORMS, *_OTHERS])


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.integers(0, 120))
def test_no_body_raises_anything_but_a_request_error(fields: dict[str, Any], prompt_tokens: int) -> None:
    try:
        params = body.fit(parse(**fields), prompt_tokens=prompt_tokens, context_tokens=100, default_max_tokens=30)
    except RequestError as error:
        assert str(error) and error.code and error.param  # noqa: PT017
    else:
        assert 1 <= params["max_tokens"] <= 100 - prompt_tokens
