"""What the official client reads of streams, from a worker with the real engine: stop strings, logprobs, tools, several
answers, and events of responses; all of it together is the whole answer, and little passes through Redis for it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import redis

from batchsvc.interactive import wire
from engine.config import EngineConfig
from engine.engine import Engine
from tests.batchsvc.interactive.conftest import MODEL, Place, until

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
LINES: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def real(place: Place) -> Iterator[Place]:
    """A place with a worker that has weights."""
    config = EngineConfig(model=str(place.text.meta.path), num_blocks=400, threads=1, reproducible=True, spec="off")
    with place.worker(Engine(config)):
        until(lambda: place.post().status_code == 200, "the worker takes calls")
        yield place


def deltas(chunks: list[Any], choice: int = 0) -> list[str]:
    """The pieces of an answer, each with something in it."""
    found = [one.delta.content for chunk in chunks for one in chunk.choices if one.index == choice]
    return [text for text in found if text]


def test_a_stop_string_that_comes_in_pieces_is_in_none_of_them(real: Place) -> None:
    whole = real.chat(**LINES).choices[0].message.content
    pieces = deltas(list(real.chat(**LINES, stream=True)))
    assert "".join(pieces) == whole and len(pieces) > 10
    seams = list(itertools.accumulate(map(len, pieces)))[4:8]
    for seam in seams:  # a string that begins in one piece and ends in the next
        stop = whole[seam - 1 : seam + 2]
        chunks = list(real.chat(**LINES, stop=[stop, "nowhere to be found"], stream=True))
        assert "".join(deltas(chunks)) == whole[: whole.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop" and chunks[-1].choices[0].stop_reason == stop
    begins = whole[seams[0]] + "\x00"  # may begin a stop string at any moment, and never does
    assert "".join(deltas(list(real.chat(**LINES, stop=begins, stream=True)))) == whole


def test_logprobs_come_with_their_text(real: Place) -> None:
    ask = {**LINES, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole, chunks = real.chat(**ask), list(real.chat(**ask, stream=True))
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(deltas(chunks, choice.index)) == choice.message.content
        told = [entry for one in mine if one.logprobs for entry in one.logprobs.content]
        assert told == choice.logprobs.content and all(len(entry.top_logprobs) == 2 for entry in told)
        assert sum(bool(one.logprobs) for one in mine) > 10, "as they come, and not all at the end"
        spelled = b"".join(bytes(entry.bytes) for entry in told)
        assert spelled.decode(errors="replace") == choice.message.content


def test_several_text_completions_are_streamed_with_their_usage(real: Place) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "The parcel", "n": 3, "logprobs": 1, **LINES}
    client = real.client()
    whole = client.completions.create(**ask)
    options: Any = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": None}
    *chunks, last = client.completions.create(**ask, stream=True, stream_options=options)
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(one.text for one in mine) == choice.text and mine[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "token_logprobs", "text_offset"):
            told = [one for part in mine if part.logprobs for one in getattr(part.logprobs, name)]
            assert told == getattr(choice.logprobs, name)
    assert [row.output_tokens for row in real.usage()][-2:] == [whole.usage.completion_tokens] * 2


def test_calls_of_tools_are_streamed_as_the_client_puts_them_together(real: Place) -> None:
    ask: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200, "temperature": 0, "seed": 1}
    (whole,) = real.chat(**ask).choices
    messages: Any = [{"role": "user", "content": "Where is my parcel?"}]
    with real.client().chat.completions.stream(model=MODEL, messages=messages, **ask) as stream:
        kinds = {event.type for event in stream}
        (told,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in kinds
    assert told.finish_reason == whole.finish_reason == "tool_calls"
    (call,), (expected,) = told.message.tool_calls, whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", expected.function.arguments)
    assert set(call.function.parsed_arguments) == {"ok"} and call.id and call.type == "function"


def test_a_form_is_streamed_and_parsed_by_the_client(real: Place) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA, "strict": True}}
    chunks = list(real.chat(response_format=form, max_tokens=60, stream=True))
    assert (
        len(deltas(chunks)) > 1
        and "".join(deltas(chunks)) == real.chat(response_format=form, max_tokens=60).choices[0].message.content
    )


@pytest.mark.parametrize("tokens", [30, 16])
def test_events_of_a_response_are_those_that_the_client_knows(real: Place, tokens: int) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": "Once", "max_output_tokens": tokens, "extra_body": {"seed": 2}}
    client = real.client()
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    typed = [type(event).__name__ for event in events]
    text = typed.count("ResponseTextDeltaEvent")
    last = {"completed": "ResponseCompletedEvent", "incomplete": "ResponseIncompleteEvent"}[str(whole.status)]
    assert text > 2 and typed == [
        "ResponseCreatedEvent",
        "ResponseInProgressEvent",
        "ResponseOutputItemAddedEvent",
        "ResponseContentPartAddedEvent",
        *["ResponseTextDeltaEvent"] * text,
        "ResponseTextDoneEvent",
        "ResponseContentPartDoneEvent",
        "ResponseOutputItemDoneEvent",
        last,
    ]
    joined = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final: Any = events[-1]
    assert joined == whole.output_text == final.response.output_text
    assert final.response.usage == whole.usage and final.response.status == whole.status
    assert final.response.incomplete_details == whole.incomplete_details


def test_a_prompt_that_is_too_long_is_refused_with_numbers(real: Place) -> None:
    client, words = real.client(), "word " * 600
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            real.chat(client, text=words, stream=stream)
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"
        numbers = [int(one.replace(",", "")) for one in re.findall(r"\d[\d,]*", refused.value.message)]
        assert 512 in numbers and max(numbers) > 600, "what there is, and what was asked for"
    with pytest.raises(openai.BadRequestError, match="512"):
        client.completions.create(model=MODEL, prompt=words, stream=True)
    with pytest.raises(openai.BadRequestError, match="512"):
        client.responses.create(model=MODEL, input=words, stream=True)


@pytest.mark.parametrize("more", [{}, {"n": 4}, {"logprobs": True, "top_logprobs": 3}])
def test_what_passes_through_redis_grows_with_the_answer(
    real: Place, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Not with its square: nothing is said twice, and what was read is gone."""
    sent: list[int] = []
    encode = wire.encode_news

    def watched(news: wire.News) -> bytes:
        data = encode(news)
        if not isinstance(news, wire.Alive):
            sent.append(len(data))
        return data

    monkeypatch.setattr(wire, "encode_news", watched)
    list(real.chat(**{**LINES, **more, "max_tokens": 250}, stream=True))
    of_token = 90 + 30 + 60 * (1 + more["top_logprobs"] if "logprobs" in more else 0)
    assert len(sent) > 50 and sum(sent) < 250 * more.get("n", 1) * of_token
    with redis.Redis.from_url(real.settings.redis_url) as client:
        (news,) = client.keys(wire.news_of("*"))
        until(lambda: client.xlen(news) < 20, "what was read is trimmed")
