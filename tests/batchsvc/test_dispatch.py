"""Sending hints: they arrive, and a dead or wiped broker costs the caller neither time nor an error."""

from __future__ import annotations

import time

import redis

from batchsvc.dispatch import CONTROL_QUEUE, CeleryDispatcher, queue_of

DIGEST = "a1b2" * 16


def wait_for(dispatcher: CeleryDispatcher, queue: str, length: int) -> None:
    deadline = time.monotonic() + 30
    while dispatcher.waiting(queue) != length:
        assert time.monotonic() < deadline, f"{dispatcher.waiting(queue)} messages, expected {length}"
        time.sleep(0.02)


def test_messages_arrive_in_their_queues_even_after_redis_was_wiped(redis_url: str) -> None:
    redis.Redis.from_url(redis_url).flushall()
    dispatcher = CeleryDispatcher(redis_url)
    for _ in range(2):
        dispatcher.plan("batch_a")
        dispatcher.finalize("batch_a")
        dispatcher.ticket(DIGEST, 3)
        dispatcher.ticket(DIGEST, 0)
        wait_for(dispatcher, CONTROL_QUEUE, 2)
        wait_for(dispatcher, queue_of(DIGEST), 3)
        redis.Redis.from_url(redis_url).flushall()
    dispatcher.close()


def test_a_dead_broker_is_never_noticed_by_the_caller() -> None:
    dispatcher = CeleryDispatcher("redis://127.0.0.1:1/0")
    for _ in range(20_000):
        dispatcher.plan("batch_a")
    assert dispatcher.waiting(CONTROL_QUEUE) is None
    dispatcher.close()


def test_closing_sends_what_is_buffered(redis_url: str) -> None:
    redis.Redis.from_url(redis_url).flushall()
    dispatcher = CeleryDispatcher(redis_url)
    dispatcher.ticket(DIGEST, 50)
    dispatcher.close()
    assert CeleryDispatcher(redis_url).waiting(queue_of(DIGEST)) == 50
