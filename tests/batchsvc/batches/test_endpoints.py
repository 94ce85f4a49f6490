"""Bodies of every endpoint: what is read out of them, and what is refused in whose words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.batches import endpoints
from batchsvc.batches.embedding_body import MOST_INPUTS, planned_cached_tokens
from batchsvc.batches.endpoints import CHAT, COMPLETIONS, EMBEDDINGS, PARSERS, RESPONSES
from batchsvc.batches.line_prompt import Fitting, tokenized
from engine.errors import RequestError
from engine.text import TextModel, load_text
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text(make_tiny_model(tmp_path_factory.mktemp("endpoints") / "tiny"))


def row_of(endpoint: str, body: dict[str, Any], text: TextModel) -> tuple[list[list[int]], dict[str, Any]]:
    """The prompts of a line and the parameters of its unit row."""
    call, prompt = endpoints.prepare(PARSERS[endpoint](body), text)
    (prompts,) = tokenized([prompt], text)
    return prompts, call.fit([len(ids) for ids in prompts], Fitting(meta=text.meta, default_max_tokens=30))


def refusal(endpoint: str, body: dict[str, Any], text: TextModel) -> tuple[str | None, str | None]:
    with pytest.raises(RequestError) as refused:
        row_of(endpoint, body, text)
    assert str(refused.value).endswith(".")
    return refused.value.code, refused.value.param


@pytest.mark.parametrize("prompt", ["Order 7", ["Order 7"], [5, 6, 7], [[5, 6, 7]]])
def test_a_completion_takes_one_prompt_in_each_form(text: TextModel, prompt: Any) -> None:
    (ids,), params = row_of(COMPLETIONS, {"prompt": prompt, "max_tokens": 5, "temperature": 0}, text)
    assert ids == ([5, 6, 7] if "Order" not in str(prompt) else text.tokenizer.encode("Order 7"))
    assert (params["endpoint"], params["max_tokens"], params["temperature"]) == (COMPLETIONS, 5, 0.0)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": [1, "a"]}, "invalid_value", "prompt"),
        ({"prompt": [1, True]}, "invalid_value", "prompt"),
        ({"prompt": [384]}, "invalid_value", "prompt"),
        ({"prompt": ["a", "b"]}, "unsupported_parameter", "prompt"),
        ({"prompt": "a", "echo": True}, "unsupported_parameter", "echo"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
        ({"prompt": "a", "best_of": 2}, "unsupported_parameter", "best_of"),
        ({"prompt": "a", "logprobs": 6}, "invalid_value", "logprobs"),
        ({"prompt": "a", "messages": []}, "unknown_parameter", "messages"),
        ({"prompt": "a", "max_tokens": 513}, "context_length_exceeded", "prompt"),
        ({"prompt": [5] * 512}, "context_length_exceeded", "prompt"),
    ],
)
def test_a_completion_that_cannot_be_run(text: TextModel, body: dict[str, Any], code: str, param: str) -> None:
    assert refusal(COMPLETIONS, body, text) == (code, param)


def test_a_completion_has_the_sampling_of_a_chat(text: TextModel) -> None:
    _, params = row_of(COMPLETIONS, {"prompt": "a", "n": 2, "logprobs": 3, "presence_penalty": 0.5}, text)
    assert (params["n"], params["logprobs"], params["presence_penalty"]) == (2, 3, 0.5)


def test_an_embedding_takes_many_texts(text: TextModel) -> None:
    prompts, params = row_of(EMBEDDINGS, {"input": ["a b", "c"], "dimensions": 8, "encoding_format": "base64"}, text)
    assert prompts == text.encode_prompts(["a b", "c"])
    assert params == {
        "endpoint": EMBEDDINGS,
        "max_tokens": 0,
        "pooling": "last",
        "encoding_format": "base64",
        "dimensions": 8,
        "segments": [len(ids) for ids in prompts],
    }
    assert "segments" not in row_of(EMBEDDINGS, {"input": "a"}, text)[1]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input[1]"),
        ({"input": ["a", [5] * 2]}, "invalid_value", "input"),
        ({"input": ["a"] * (MOST_INPUTS + 1)}, "invalid_value", "input"),
        ({"input": [[5] * 3, [5] * 513]}, "context_length_exceeded", "input[1]"),
        ({"input": [[5] * 512] * 600}, "invalid_value", "input"),
        ({"input": "a", "dimensions": 65}, "invalid_value", "dimensions"),
        ({"input": "a", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "temperature": 0}, "unknown_parameter", "temperature"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "unsupported_parameter", "truncate_prompt_tokens"),
    ],
)
def test_an_embedding_that_cannot_be_run(text: TextModel, body: dict[str, Any], code: str, param: str) -> None:
    assert refusal(EMBEDDINGS, body, text) == (code, param)


def test_a_response_is_the_chat_that_says_the_same(text: TextModel) -> None:
    parts = [{"type": "input_text", "text": "b"}]
    body = {
        "instructions": "Be short.",
        "input": [{"role": "user", "content": "a"}, {"type": "message", "role": "user", "content": parts}],
        "max_output_tokens": 7,
        "temperature": 0,
        "metadata": {"any": "thing"},
    }
    chat = {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
        ],
        "max_tokens": 7,
        "temperature": 0,
    }
    prompts, params = row_of(RESPONSES, body, text)
    same_prompts, same_params = row_of(CHAT, chat, text)
    assert prompts == same_prompts
    assert params == same_params | {
        "endpoint": RESPONSES,
        "shown": {"instructions": "Be short.", "max_output_tokens": 7},
    }


def test_a_form_of_a_response_is_that_of_a_chat(text: TextModel) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"name": "n", "schema": schema}
    _, mine = row_of(RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", **named}}}, text)
    response_format = {"type": "json_schema", "json_schema": named}
    _, chat = row_of(CHAT, {"messages": [{"role": "user", "content": "x"}], "response_format": response_format}, text)
    assert mine["grammar"] == chat["grammar"] != ""


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "unsupported_parameter", "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_parameter",
            "input[0].content[0]",
        ),
        ({"input": [{"role": "robot", "content": "x"}]}, "invalid_value", "input[0].role"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"input": "x", "previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"input": "x", "max_tokens": 5}, "unsupported_parameter", "max_tokens"),
        ({"input": "x", "max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 600}, "context_length_exceeded", "input"),
        ({"input": "x", "text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "unsupported_parameter", "reasoning.effort"),
        ({"input": "x", "reasoning": {"summary": "auto"}}, "unsupported_parameter", "reasoning.summary"),
        ({"input": "x", "instruction": "y"}, "unknown_parameter", "instruction"),
    ],
)
def test_a_response_that_cannot_be_run(text: TextModel, body: dict[str, Any], code: str, param: str) -> None:
    assert refusal(RESPONSES, body, text) == (code, param)


# what OpenAI's current clients, and vLLM's, may send without asking for anything that changes an answer
_USUAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "parallel_tool_calls": True, "modalities": ["text"]},
    COMPLETIONS: {"prompt": "x", "echo": False, "best_of": 1, "suffix": None},
    EMBEDDINGS: {"input": "x", "encoding_format": "float", "dimensions": None},
    RESPONSES: {"input": "x", "background": False, "include": [], "max_tool_calls": 3, "truncation": "disabled"},
}
_HARMLESS: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "service_tier": "flex",
    "stream": False,
    "stream_options": None,
    "moderation": None,
    "priority": 0,
    "request_id": "r",
}


@pytest.mark.parametrize("endpoint", sorted(_USUAL))
def test_what_clients_send_along_is_taken(text: TextModel, endpoint: str) -> None:
    bare = {name: value for name, value in _USUAL[endpoint].items() if name in ("messages", "prompt", "input")}
    tier = {"service_tier": "default"} if endpoint in (CHAT, RESPONSES) else {}  # where answers have the field
    assert row_of(endpoint, _USUAL[endpoint] | _HARMLESS, text)[1] == row_of(endpoint, bare, text)[1] | tier


def test_a_model_that_pools_otherwise_makes_no_embeddings(text: TextModel) -> None:
    other = replace(text, meta=replace(text.meta, pooling=None))
    assert refusal(EMBEDDINGS, {"input": "a"}, other) == ("endpoint_not_supported", "model")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = [
    "input",
    "prompt",
    "messages",
    "instructions",
    "max_tokens",
    "max_output_tokens",
    "temperature",
    "top_p",
    "dimensions",
    "encoding_format",
    "text",
    "reasoning",
    "logprobs",
    "echo",
    "stop",
    "n",
    "role",
    "content",
    "seed",
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=6))
def test_any_body_is_a_row_or_a_refusal(text: TextModel, endpoint: str, body: dict[str, Any]) -> None:
    try:
        prompts, params = row_of(endpoint, body, text)
    except RequestError:
        return  # a line of its own says so
    assert prompts and all(prompts)
    assert params.get("endpoint", CHAT) == endpoint


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.lists(st.integers(1, 60), min_size=1, max_size=4), st.sampled_from(["last", "mean"]))
def test_planned_as_cached_is_what_the_first_text_can_take(shared: int, sizes: list[int], pooling: str) -> None:
    total = sum(sizes)
    shared = min(shared, total - 1) // 16 * 16
    params = {"pooling": pooling, **({"segments": sizes} if len(sizes) > 1 else {})}
    planned = planned_cached_tokens(params, shared, total)
    assert planned % 16 == 0
    assert 0 <= planned <= min(shared, sizes[0] - 1)
    assert pooling == "last" or planned == 0
    assert planned_cached_tokens(params, total, total) == total, "a repeated row is run once, whatever it is"
    assert planned_cached_tokens({"max_tokens": 5}, shared, total) == shared
