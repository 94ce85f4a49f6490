"""What goes wrong around a call: nobody there, gone clients, slow clients, too many; each ends in bounded time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import redis
from sqlalchemy import select

from batchsvc.billing.tables import CallHold
from batchsvc.interactive import call_response, service, wire
from tests.batchsvc.interactive.conftest import MODEL, Held, Place, WatchedEngine, call_settings, opened, until
from tests.faults.proxy import FaultProxy


def refused_for_now(place: Place, code: str) -> bool:
    """Whether a call ends with this 503."""
    return is_for_now(place.post(), code)


def is_for_now(answer: httpx.Response, code: str) -> bool:
    """Whether this is a 503 that says when to try again."""
    return (answer.status_code, answer.headers["retry-after"], answer.json()["error"]["code"]) == (503, "5", code)


def test_without_a_worker_a_call_gets_503(place: Place) -> None:
    assert refused_for_now(place, "no_worker")
    with place.worker():
        until(lambda: place.post().status_code == 200, "the worker takes calls")
    until(lambda: place.post().status_code == 503, "the worker that left is missed")
    assert refused_for_now(place, "no_worker")


def test_without_redis_a_call_gets_503(sqlite_url: str, calls_redis: str, tiny: Path) -> None:
    host, port = urlsplit(calls_redis).hostname, urlsplit(calls_redis).port
    with FaultProxy((str(host), int(port or 0))) as proxy:
        through = calls_redis.replace(f":{port}", f":{proxy.port}")
        with opened(call_settings(sqlite_url, through), tiny) as place, place.worker():
            until(lambda: place.post().status_code == 200, "the worker takes calls")
            for trouble in (proxy.refuse, proxy.black_hole):
                trouble()
                assert refused_for_now(place, "queue_unavailable")
                proxy.heal()
                until(lambda: place.post().status_code == 200, "calls go on")


@pytest.fixture
def held(place: Place) -> Iterator[Held]:
    """An engine that stands still until it is let go."""
    engine = Held(place.text, step_tokens=1)
    with place.worker(engine):
        until(lambda: place.post(max_tokens=10**6).status_code == 400, "the API answers")
        yield engine
        engine.goes.set()


def raw(place: Place, **body: object) -> socket.socket:
    """A call on a socket of the test's own, sent and not read."""
    url = urlsplit(place.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect((str(url.hostname), int(url.port or 0)))
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0} | body
    data = json.dumps(asked).encode()
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + f"authorization: Bearer {place.key}\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_call(place: Place, held: Held, stream: bool) -> None:
    until(lambda: _is_there(place), "the worker is there")
    billed = place.num_used()
    client = raw(place, stream=stream)
    until(lambda: held.requests, "the call is in the engine")
    client.close()
    until(lambda: held.aborted == [held.requests[0].id], "the sequence is aborted")
    held.goes.set()
    until(lambda: not held.has_work(), "the engine is idle")
    assert place.num_used() == billed


def _is_there(place: Place) -> bool:
    with redis.Redis.from_url(place.settings.redis_url) as client:
        return bool(client.exists(wire.ready_of(place.digest)))


def test_a_worker_that_stops_says_so(place: Place) -> None:
    engine = WatchedEngine(place.text, tokens_per_s=20)
    said: list[httpx.Response] = []
    billed = place.num_used()
    with place.worker(engine, term_grace_s=0.6):
        until(lambda: _is_there(place), "the worker is there")
        caller = threading.Thread(target=lambda: said.append(place.post(max_tokens=400, ignore_eos=True)))
        caller.start()
        until(lambda: engine.requests, "the call is in the engine")
    caller.join(20)
    assert is_for_now(said[0], "worker_lost")
    assert place.num_used() == billed


def test_calls_beyond_the_limit_are_refused_at_once(sqlite_url: str, calls_redis: str, tiny: Path) -> None:
    settings = call_settings(sqlite_url, calls_redis, interactive_max=4)
    with opened(settings, tiny) as place:
        engine = Held(place.text)
        with place.worker(engine):
            until(lambda: _is_there(place), "the worker is there")
            inside = [raw(place) for _ in range(4)]
            until(lambda: len(engine.requests) == 4, "four calls run")
            with ThreadPoolExecutor(8) as pool:
                answers = list(pool.map(lambda _: place.post(), range(60)))
            assert {answer.status_code for answer in answers} == {429}
            assert {answer.headers["retry-after"] for answer in answers} == {"1"}
            with pytest.raises(openai.RateLimitError, match="takes no more at once"):
                place.chat()
            assert len(engine.requests) == 4, "none of them came as far as the engine"
            engine.goes.set()
            for client in inside:
                assert b"200 OK" in client.recv(200)
                client.close()
            until(lambda: place.post().status_code == 200, "the slots are free again")


def test_a_client_that_does_not_read_ends_its_call(sqlite_url: str, calls_redis: str, tiny: Path) -> None:
    """Sockets take megabytes by themselves, so the answer is made long by logprobs."""
    settings = call_settings(sqlite_url, calls_redis, interactive_buffer_bytes=20_000)
    with opened(settings, tiny) as place:
        engine = WatchedEngine(place.text, tokens_per_s=3_000)
        with place.worker(engine):
            until(lambda: _is_there(place), "the worker is there")
            body = {"max_tokens": 480, "n": 16, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
            client = raw(place, stream=True, **body)
            until(lambda: engine.aborted, "the call is ended")
            assert engine.has_work(), "before its answer was whole"
            client.close()
            until(lambda: not engine.has_work(), "the engine is idle")
            assert place.usage() == []
            assert place.chat().choices, "others aren't hurt"


def test_who_is_told_of_a_timeout_is_not_charged(
    sqlite_url: str, calls_redis: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was whole in time is charged and sent, however long its charge takes."""
    charge = service.charge

    def slow_charge(*given: Any) -> Any:
        time.sleep(0.7)
        return charge(*given)

    settings = call_settings(sqlite_url, calls_redis, interactive_timeout_s=0.6)
    with opened(settings, tiny) as place, place.worker(WatchedEngine(place.text)):
        until(lambda: place.post().status_code == 200, "the worker takes calls")
        billed = place.num_used()
        monkeypatch.setattr(service, "charge", slow_charge)
        assert place.post().status_code == 200 and place.num_used() == billed + 1


def test_an_answer_that_takes_too_long_is_refused_for_now(sqlite_url: str, calls_redis: str, tiny: Path) -> None:
    with opened(call_settings(sqlite_url, calls_redis, interactive_timeout_s=0.4), tiny) as place:
        engine = Held(place.text)
        with place.worker(engine):
            until(lambda: _is_there(place), "the worker is there")
            for stream in (False, True):  # of which nothing was sent yet
                assert is_for_now(place.post(stream=stream), "call_timeout")
            until(lambda: len(engine.aborted) == 2, "both are aborted")
            engine.goes.set()
        assert place.usage() == []


def test_what_a_call_holds_is_held_as_long_as_it_runs_and_refuses_others_for_now_only(
    place: Place, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_response, "_RENEW_S", 0.05)
    _, key = place.new_project(budget_nanos=3_000)
    until(lambda: _is_there(place), "the worker is there")

    def expiry() -> int:
        with place.db.reading() as session:
            return session.scalar(select(CallHold.expires_ms)) or 0

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(place.chat, place.client(key), max_tokens=20)
        until(lambda: held.requests, "the first call runs")
        begun_ms = expiry()
        until(lambda: expiry() > begun_ms, "its hold is renewed")
        with pytest.raises(openai.RateLimitError) as refused:
            place.chat(place.client(key), max_tokens=20)
        assert refused.value.code == "budget_held" and refused.value.response.headers["retry-after"] == "1"
        held.goes.set()
        assert first.result(20).choices
    assert place.chat(place.client(key), max_tokens=5).choices and place.holds() == 0


def test_a_worker_with_much_to_say_is_there_all_the_same(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    goes, encode = threading.Event(), wire.encode_news

    def encode_slowly(news: wire.News) -> bytes:
        if isinstance(news, wire.Grown | wire.Ended):
            goes.wait(30)
        return encode(news)

    monkeypatch.setattr(wire, "READY_S", 0.05)
    monkeypatch.setattr(wire, "READY_TTL_S", 0.3)
    monkeypatch.setattr(wire, "encode_news", encode_slowly)
    engine = WatchedEngine(place.text)
    with place.worker(engine), ThreadPoolExecutor(1) as pool:
        until(lambda: _is_there(place), "the worker is there")
        said = pool.submit(place.post)
        until(lambda: engine.requests and not engine.has_work(), "the answer waits to be sent")
        time.sleep(0.5)
        assert _is_there(place)
        goes.set()
        assert said.result(30).status_code == 200
