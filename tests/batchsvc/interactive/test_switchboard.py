"""What a switchboard hears and doesn't hear of a call, from a worker that is nothing but messages in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
import structlog

from batchsvc.errors import OverloadedError, UnavailableError
from batchsvc.interactive import switchboard, wire
from batchsvc.interactive.line import Line
from batchsvc.interactive.switchboard import Switchboard
from batchsvc.interactive.wire import Ended, Grown, NewCall, Taken
from engine.request import Completion, FinishReason, NewText, Usage

DIGEST = "d" * 64
LIVENESS_S = 30


@pytest.fixture
def worker(calls_redis: str) -> Iterator[redis.Redis]:
    """Redis, with a sign of a worker."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with redis.Redis.from_url(calls_redis) as client:
        client.set(wire.ready_of(DIGEST), "w")
        yield client


def call(board: Switchboard) -> NewCall:
    return NewCall(id="c", api=board.id, prompt_ids=[1], params={}, seed=1, salt="s", streams=True)


def say(worker: redis.Redis, board: Switchboard, *said: wire.News | bytes) -> None:
    for one in said:
        message = one if isinstance(one, bytes) else wire.encode_news(one)
        worker.xadd(wire.news_of(board.id), {wire.FIELD: message})


def ended(num_grown: int) -> Ended:
    done = Completion(request_id="c", token_ids=(), text="a", finish_reason=FinishReason.STOP, usage=Usage(1, 0, 1))
    return Ended("c", num_grown, done)


def run(url: str, test: Callable[[Switchboard], Awaitable[None]]) -> None:
    async def opened() -> None:
        board = Switchboard(url, most_calls=4, most_bytes=10_000)
        try:
            async with asyncio.timeout(LIVENESS_S):
                await test(board)
        finally:
            await board.close()

    asyncio.run(opened())


async def connected(worker: redis.Redis, board: Switchboard, *said: wire.News | bytes) -> Line:
    """The line of a call of which a worker says this as soon as it has read it."""
    connecting = asyncio.create_task(board.connect(DIGEST, call(board)))
    try:
        while not worker.xlen(wire.calls_of(DIGEST)):
            await asyncio.sleep(0.01)
            assert not connecting.done() or connecting.result()
        worker.delete(wire.calls_of(DIGEST))
        say(worker, board, *said)
        return await connecting
    finally:
        connecting.cancel()
        with suppress(asyncio.CancelledError, UnavailableError):
            await connecting


def test_no_message_makes_it_deaf(calls_redis: str, worker: redis.Redis) -> None:
    junk = [b'["failed", "c", "x", "code", "Says."]', b'["grown", "c", 0, [[5, 0, []]]]', b'["ended", "c"]', b"[[]]"]

    async def test(board: Switchboard) -> None:
        line = await connected(worker, board, *junk, Taken("c", "w"), ended(0))
        assert await line.next() == ended(0)

    run(calls_redis, test)


def test_whatever_goes_wrong_in_a_task_it_goes_on(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, wrong = Switchboard._read, [ZeroDivisionError("Nobody thought of it.")]

    async def read_badly(board: Switchboard) -> None:
        if wrong:
            raise wrong.pop()
        await read(board)

    monkeypatch.setattr(Switchboard, "_read", read_badly)

    async def test(board: Switchboard) -> None:
        assert (await connected(worker, board, Taken("c", "w"))).worker == "w"

    run(calls_redis, test)


def test_a_whole_answer_survives_the_silence_after_it(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE_S", 0.0)
    monkeypatch.setattr(switchboard, "_LOOK_S", 0.02)
    said = [Grown("c", 0, (NewText("a"),)), ended(1)]

    async def test(board: Switchboard) -> None:
        line = await connected(worker, board, *said, Taken("c", "w"))
        while not line.is_over:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert [await line.next(), await line.next()] == said

    run(calls_redis, test)


def test_a_worker_that_falls_silent_is_missed(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE_S", 0.3)

    async def test(board: Switchboard) -> None:
        line = await connected(worker, board, Taken("c", "w"))
        with pytest.raises(UnavailableError) as silent:
            await line.next()
        assert silent.value.code == "worker_lost"

    run(calls_redis, test)


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_process_that_comes_to_read_late_takes_no_worker_for_dead(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch, is_taken: bool
) -> None:
    """As one does that a thousand clients knock at."""
    monkeypatch.setattr(wire, "SILENCE_S", 0.6)
    monkeypatch.setattr(wire, "READY_TTL_S", 0.6)
    monkeypatch.setattr(switchboard, "_LOOK_S", 0.02)
    hear, is_late = Switchboard._hear, not is_taken

    async def hear_late(board: Switchboard, message: bytes) -> None:
        if is_late:
            await asyncio.sleep(1.8)
        await hear(board, message)

    monkeypatch.setattr(Switchboard, "_hear", hear_late)

    async def test(board: Switchboard) -> None:
        nonlocal is_late
        line = await connected(worker, board, Taken("c", "w"))
        is_late = True
        for _ in range(3):
            say(worker, board, wire.Alive("w", ("c",)))
            await asyncio.sleep(0.3)
        say(worker, board, ended(0))
        assert await line.next() == ended(0)

    run(calls_redis, test)


def test_a_worker_that_dies_with_a_call_before_a_word_is_missed(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "READY_TTL_S", 0.1)

    async def test(board: Switchboard) -> None:
        with pytest.raises(UnavailableError) as lost:
            await connected(worker, board)
        assert lost.value.code == "worker_lost"

    run(calls_redis, test)


def test_workers_without_room_are_busy_and_not_away(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switchboard, "_TAKE_S", 0.1)

    async def test(board: Switchboard) -> None:
        with pytest.raises(OverloadedError) as busy:
            await board.connect(DIGEST, call(board))
        assert busy.value.code == "too_many_calls"

    run(calls_redis, test)
    assert not worker.xlen(wire.calls_of(DIGEST)), "nobody shall take it now"


def test_a_redis_that_answers_each_time_but_slowly_is_waited_for_once(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call asks of it before it waits has one deadline, not one for each question."""
    monkeypatch.setattr(switchboard, "_REACH_S", 0.5)
    announce, add = Switchboard._announce, Switchboard._add

    async def announce_slowly(board: Switchboard, digest: str) -> None:
        await announce(board, digest)
        await asyncio.sleep(0.35)

    async def add_slowly(board: Switchboard, *given: Any) -> bytes:
        await asyncio.sleep(0.35)
        return await add(board, *given)

    monkeypatch.setattr(Switchboard, "_announce", announce_slowly)
    monkeypatch.setattr(Switchboard, "_add", add_slowly)

    async def test(board: Switchboard) -> None:
        with pytest.raises(UnavailableError) as late:
            await connected(worker, board, Taken("c", "w"))
        assert late.value.code == "queue_unavailable"

    run(calls_redis, test)
    assert not worker.xlen(wire.calls_of(DIGEST)), "it was given up before it was passed on"


def test_looks_have_a_deadline_each_while_workers_are_busy(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switchboard, "_REACH_S", 0.6)
    monkeypatch.setattr(switchboard, "_LOOK_S", 0.05)
    look, looks = Switchboard._look_for, 0

    async def look_slowly(board: Switchboard, *given: Any) -> tuple[bool, bool]:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0.15)
        return await look(board, *given)

    monkeypatch.setattr(Switchboard, "_look_for", look_slowly)

    async def test(board: Switchboard) -> None:
        connecting = asyncio.create_task(board.connect(DIGEST, call(board)))
        while looks < 8:  # longer than one deadline
            await asyncio.sleep(0.01)
            assert not connecting.done() or connecting.result()
        say(worker, board, Taken("c", "w"))
        assert (await connecting).worker == "w"

    run(calls_redis, test)


def test_a_stream_made_anew_is_read_from_its_start(calls_redis: str, worker: redis.Redis) -> None:
    """Its ids are times: with a clock that was put back they are lower than what was read last."""

    async def test(board: Switchboard) -> None:
        board._last = b"99999999999999-0"
        assert (await connected(worker, board, Taken("c", "w"))).worker == "w"

    run(calls_redis, test)


def test_large_news_are_read_beside_the_loop(
    calls_redis: str, worker: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switchboard, "_MUCH_BYTES", 1)
    on_loop: list[bool] = []
    decode = wire.decode_news

    def watched(data: bytes) -> Any:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            on_loop.append(True)
        return decode(data)

    monkeypatch.setattr(wire, "decode_news", watched)

    async def test(board: Switchboard) -> None:
        line = await connected(worker, board, Taken("c", "w"), ended(0))
        assert await line.next() == ended(0) and not on_loop

    run(calls_redis, test)
