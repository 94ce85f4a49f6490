"""What the official client sees of trouble in the middle of a call, and what becomes of a call that it gives up."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import redis
from openai.types.responses import ResponseErrorEvent

from batchsvc.interactive import switchboard, wire
from tests.batchsvc.interactive.conftest import (
    LIVENESS_S,
    MODEL,
    Held,
    Place,
    WatchedEngine,
    call_settings,
    opened,
    until,
)

LONG: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


def is_there(place: Place) -> bool:
    with redis.Redis.from_url(place.settings.redis_url) as client:
        return bool(client.exists(wire.ready_of(place.digest)))


def num_waiting(place: Place) -> int:
    with redis.Redis.from_url(place.settings.redis_url) as client:
        return int(client.xlen(wire.calls_of(place.digest)))


def test_a_stream_that_is_closed_ends_its_sequence(place: Place) -> None:
    engine = WatchedEngine(place.text, tokens_per_s=50)
    billed = place.num_used()
    with place.worker(engine):
        until(lambda: is_there(place), "the worker is there")
        with place.chat(stream=True, **LONG) as stream:
            for _, chunk in zip(range(4), stream, strict=False):
                assert chunk.choices
        until(lambda: engine.requests and engine.aborted == [engine.requests[0].id], "the sequence is aborted")
        until(lambda: not engine.has_work(), "the engine is idle")
        assert place.num_used() == billed


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_waits_no_longer_ends_its_call(place: Place, stream: bool) -> None:
    engine = Held(place.text)
    billed = place.num_used()
    with place.worker(engine):
        until(lambda: is_there(place), "the worker is there")
        with pytest.raises(openai.APITimeoutError):
            place.chat(place.client(timeout=2.0), stream=stream)
        until(lambda: engine.requests and engine.aborted == [engine.requests[0].id], "the sequence is aborted")
        engine.goes.set()
        until(lambda: not engine.has_work(), "the engine is idle")
        assert place.num_used() == billed


def test_a_call_that_no_worker_has_taken_is_withdrawn(place: Place) -> None:
    engine = Held(place.text)
    with place.worker(engine, interactive_max=1), ThreadPoolExecutor(1) as pool:
        until(lambda: is_there(place), "the worker is there")
        first = pool.submit(place.chat)
        until(lambda: engine.requests, "its only place is taken")
        with pytest.raises(openai.APITimeoutError):
            place.chat(place.client(timeout=2.0))
        until(lambda: num_waiting(place) == 0, "nobody shall take it now")
        engine.goes.set()
        assert first.result(LIVENESS_S).choices
        assert place.chat().choices and len(engine.requests) == 2


def test_a_stream_that_is_lost_in_the_middle_raises(place: Place) -> None:
    billed = place.num_used()
    engine = WatchedEngine(place.text, tokens_per_s=40)
    client = place.client()
    with place.worker(engine, term_grace_s=0.6):
        until(lambda: is_there(place), "the worker is there")
        chat = iter(place.chat(client, stream=True, **LONG))
        text = iter(client.completions.create(model=MODEL, prompt="Once", stream=True, **LONG))
        events = client.responses.create(model=MODEL, input="Once", max_output_tokens=400, stream=True)
        assert all(next(stream).choices for stream in (chat, text, chat, text))
        assert next(events).type == "response.created"
    for stream in (chat, text):
        with pytest.raises(openai.APIError, match="send it again") as lost:
            list(stream)
        assert lost.value.code == "worker_lost"
    *_, last = events
    assert isinstance(last, ResponseErrorEvent) and last.code == "worker_lost" and "send it again" in last.message
    assert place.num_used() == billed


def test_a_client_that_reads_too_slowly_loses_its_stream(sqlite_url: str, calls_redis: str, tiny: Path) -> None:
    """Never so that what it has looks whole; sockets take megabytes by themselves, so logprobs make the answer long."""
    settings = call_settings(sqlite_url, calls_redis, interactive_buffer_bytes=20_000)
    small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)])
    with opened(settings, tiny) as place:
        engine = WatchedEngine(place.text, tokens_per_s=3_000)
        with place.worker(engine), httpx.Client(transport=small, timeout=60) as http:
            until(lambda: is_there(place), "the worker is there")
            body = {"max_tokens": 480, "n": 16, "logprobs": True, "top_logprobs": 20, "stream": True}
            stream = iter(place.chat(place.client(http_client=http), **body, extra_body={"ignore_eos": True}))
            assert next(stream).choices
            until(lambda: engine.aborted, "the call is ended")
            with pytest.raises((openai.APIError, httpx.TransportError)):
                list(stream)
            until(lambda: not engine.has_work(), "the engine is idle")
            assert place.usage() == [] and place.chat().choices, "others aren't hurt"


def test_calls_with_many_logprobs_do_not_fill_the_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard, "_MOST_LOGPROBS", 500)
    many: dict[str, Any] = {"max_tokens": 20, "logprobs": True, "top_logprobs": 20}
    engine = Held(place.text)
    _, key = place.new_project(budget_nanos=1_000_000)
    with place.worker(engine), ThreadPoolExecutor(2) as pool:
        until(lambda: is_there(place), "the worker is there")
        first, plain = pool.submit(place.chat, **many), pool.submit(place.chat)
        until(lambda: len(engine.requests) == 2, "both run")
        for stream in (True, False):
            with pytest.raises(openai.RateLimitError, match="420 logprobs, and this one 420, of 500") as refused:
                place.chat(place.client(key), stream=stream, **many)
            assert refused.value.code == "too_many_calls" and refused.value.response.headers["retry-after"] == "1"
        until(lambda: place.holds() == 0, "they hold nothing")
        engine.goes.set()
        assert len(first.result(LIVENESS_S).choices[0].logprobs.content) > 1 and plain.result(LIVENESS_S).choices
        assert place.chat(place.client(key), **many).choices


def test_a_hundred_calls_of_one_client_at_once_have_an_answer_or_a_time_to_come_back(
    sqlite_url: str, calls_redis: str, tiny: Path
) -> None:
    async def ask(client: openai.AsyncOpenAI) -> list[str | None]:
        async def one(number: int) -> str | None:
            messages: Any = [{"role": "user", "content": "Hi"}]
            try:
                if number % 2:
                    stream = await client.chat.completions.create(
                        model=MODEL, messages=messages, max_tokens=4, stream=True
                    )
                    assert [chunk async for chunk in stream][-1].choices[0].finish_reason
                else:
                    await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
            except openai.RateLimitError as error:
                return str(error.response.headers.get("retry-after"))
            return None

        async with client:
            return await asyncio.gather(*map(one, range(100)))

    with opened(call_settings(sqlite_url, calls_redis, interactive_max=4), tiny) as place:
        engine = Held(place.text)
        with place.worker(engine):
            until(lambda: is_there(place), "the worker is there")
            client = openai.AsyncOpenAI(base_url=f"{place.url}/v1", api_key=place.key, max_retries=0, timeout=60)
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(asyncio.run, ask(client))
                until(lambda: len(engine.requests) == 4, "four run")
                time.sleep(1)  # most of the others come meanwhile, and find no slot
                engine.goes.set()
                said = asked.result(LIVENESS_S)
    answered = said.count(None)
    assert set(said) == {None, "1"} and 4 <= answered == len(engine.requests) < 100


def test_a_body_that_does_not_come_gives_its_slot_back(sqlite_url: str, calls_redis: str, tiny: Path) -> None:
    settings = call_settings(sqlite_url, calls_redis, interactive_max=1, interactive_stall_s=0.5)
    with opened(settings, tiny) as place:
        url = urlsplit(place.url)
        with socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=LIVENESS_S) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {place.key}\r\n"
            client.sendall(f"{head}content-type: application/json\r\ncontent-length: 500\r\n\r\n{{".encode())
            answer = b""
            while b"body_timeout" not in answer:
                more = client.recv(4_096)
                assert more, answer
                answer += more
        assert b" 400 " in answer.split(b"\r\n")[0]
        assert place.post().json()["error"]["code"] == "no_worker", "the slot is free"
