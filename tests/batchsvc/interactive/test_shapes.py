"""Streams: however an answer is cut into texts, the client puts the whole of it together again."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches.answers import Answered
from batchsvc.batches.endpoints import CHAT, COMPLETIONS, RESPONSES
from batchsvc.errors import UnavailableError
from batchsvc.interactive.shapes import Head, stream_of, whole_body
from engine.request import Choice, Completion, FinishReason, NewText, SpelledLogprob, Usage

TEXT = "Grüße\u2028an 雪 <end>"


def spelled(text: str) -> tuple[SpelledLogprob, ...]:
    return tuple(SpelledLogprob(one.encode(), -0.5) for one in text)


def answered(endpoint: str, texts: list[str], *, logprobs: bool = False, **params: Any) -> tuple[Answered, Completion]:
    answers = tuple(Choice(text, FinishReason.STOP, spelled(text) if logprobs else None, "!") for text in texts)
    first = answers[0]
    completion = Completion(
        request_id="c",
        token_ids=(),
        text=first.text,
        finish_reason=first.finish_reason,
        usage=Usage(9, 0, 5),
        logprobs=first.logprobs,
        stopped_by=first.stopped_by,
        choices=answers if len(answers) > 1 else (),
    )
    named = {} if endpoint == CHAT else {"endpoint": endpoint}
    made = Answered(
        line_ident="i",
        model="m",
        created_s=1,
        params={**named, **params},
        text=first.text,
        finish_reason="stop",
        vectors=(),
        choices=answers,
        input_tokens=9,
        cached_tokens=0,
        output_tokens=5,
        cost_nanos=3,
        system_fingerprint="fp",
    )
    return made, completion


def events(sent: bytes) -> list[dict[str, Any]]:
    """What a client reads, one line an event even for those that split lines at more than a newline."""
    found = []
    for block in sent.decode().split("\n\n")[:-1]:
        data = block.splitlines()[-1]
        assert data.startswith("data: ") and len(block.splitlines()) <= 2
        if data != "data: [DONE]":
            found.append(orjson.loads(data.removeprefix("data: ")))
    return found


def streamed(endpoint: str, texts: list[str], cuts: list[list[int]], **given: Any) -> list[dict[str, Any]]:
    """The events of an answer whose texts became certain up to these places, in turn."""
    logprobs = given.get("logprobs", False)
    made, completion = answered(endpoint, texts, **given)
    stream = stream_of(endpoint, Head(ident="i", model="m", created_s=1, params=made.params, includes_usage=True))
    sent, at = b"", [0] * len(texts)
    for places in cuts:
        grown = []
        for choice, place in enumerate(places[: len(texts)]):
            start, end = at[choice], max(at[choice], min(place, len(texts[choice])))
            piece = texts[choice][start:end]
            grown.append(NewText(piece, choice, spelled(piece) if logprobs else ()))
            at[choice] = end
        sent += b"".join(stream.grow(grown))
    return events(sent + b"".join(stream.end(made, completion)))


cuts = st.lists(st.lists(st.integers(0, 20), min_size=2, max_size=2), max_size=4)


@given(cuts, st.booleans())
def test_chat_chunks_join_to_the_answers(places: list[list[int]], logprobs: bool) -> None:
    texts = [TEXT, "no"]
    found = streamed(CHAT, texts, places, logprobs=logprobs)
    *chunks, usage = found
    assert usage["choices"] == [] and usage["usage"]["cost_nanos"] == 3
    assert chunks[-1]["system_fingerprint"] == usage["system_fingerprint"] == "fp"
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    for choice, text in enumerate(texts):
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice]
        assert mine[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(one["delta"].get("content", "") for one in mine) == text
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["stop_reason"] == "!"
        told = [entry["token"] for one in mine for entry in (one["logprobs"] or {"content": []})["content"]]
        assert told == (list(text) if logprobs else [])


@given(cuts, st.booleans())
def test_text_chunks_join_to_the_answers(places: list[list[int]], logprobs: bool) -> None:
    texts = [TEXT, "no"]
    *chunks, usage = streamed(COMPLETIONS, texts, places, logprobs=logprobs)
    assert chunks[-1]["system_fingerprint"] == usage["system_fingerprint"] == "fp"
    whole = whole_body(*answered(COMPLETIONS, texts, logprobs=logprobs))
    for choice, text in enumerate(texts):
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice]
        assert "".join(one["text"] for one in mine) == text and mine[-1]["finish_reason"] == "stop"
        offsets = [at for one in mine for at in (one["logprobs"] or {"text_offset": []})["text_offset"]]
        assert offsets == (whole["choices"][choice]["logprobs"]["text_offset"] if logprobs else [])


@given(cuts)
def test_events_of_a_response_are_numbered_and_join_to_it(places: list[list[int]]) -> None:
    found = streamed(RESPONSES, [TEXT], places)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) <= {"output_text.delta"}
    assert "".join(event["delta"] for event in found if "delta" in event) == TEXT
    assert found[-1]["response"] == whole_body(*answered(RESPONSES, [TEXT]))
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []


def test_calls_of_tools_come_whole() -> None:
    said = '{"name": "look", "arguments": {"at": 1}}'
    found = streamed(CHAT, [said], [[3], [9]], calls="json")
    deltas = [one["delta"] for chunk in found for one in chunk["choices"]]
    assert deltas[0]["role"] == "assistant" and len(deltas) == 3
    (call,) = deltas[1]["tool_calls"]
    assert call["index"] == 0 and call["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
def test_a_stream_that_breaks_off_says_why(endpoint: str) -> None:
    stream = stream_of(endpoint, Head(ident="i", model="m", created_s=1, params={"endpoint": endpoint}))
    list(stream.grow([NewText("a")]))
    (event,) = events(stream.fail(UnavailableError("It is gone.", code="worker_lost")))
    said = event if endpoint == RESPONSES else event["error"]
    assert (said["message"], said["code"]) == ("It is gone.", "worker_lost")
