"""The line of one call: what waits for its client is bounded, and what got lost is noticed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from batchsvc.errors import InvalidRequestError, UnavailableError
from batchsvc.interactive.line import Line
from batchsvc.interactive.wire import Ended, Failed, Grown, Taken
from engine.request import Completion, FinishReason, NewText, Usage

NOT_A_STATUS: Any = "x"


def line(most_bytes: int = 10_000) -> Line:
    return Line("c", most_bytes=most_bytes, now_s=0.0)


def grown(no: int, text: str = "a") -> Grown:
    return Grown("c", no, (NewText(text),))


def ended(num_grown: int) -> Ended:
    done = Completion(request_id="c", token_ids=(), text="aa", finish_reason=FinishReason.STOP, usage=Usage(1, 0, 2))
    return Ended("c", num_grown, done)


def read(waiting: Line) -> Grown | Ended:
    return asyncio.run(asyncio.wait_for(waiting.next(), 1))


def test_news_come_in_order() -> None:
    one = line()
    for news in (Taken("c", "w"), grown(0), grown(1), ended(2)):
        one.push(news, 3.0)
    assert (one.worker, one.heard_s, one.is_over) == ("w", 3.0, True)
    assert [read(one) for _ in range(3)] == [grown(0), grown(1), ended(2)]


def test_an_end_that_has_the_rest_alone_is_made_whole() -> None:
    one = line()
    for news in (grown(0), grown(1), replace(ended(2), is_rest=True)):
        one.push(news, 3.0)
    said = [read(one) for _ in range(3)]
    assert said[-1] == replace(ended(2), completion=replace(ended(2).completion, text="aaaa"))


@pytest.mark.parametrize("news", [[grown(1)], [grown(0), grown(2)], [grown(0), ended(2)], [grown(0), grown(0)]])
def test_a_gap_ends_the_call(news: list[Grown | Ended]) -> None:
    one = line()
    for said in news:
        one.push(said, 0.0)
    with pytest.raises(UnavailableError) as lost:
        read(one)
    assert lost.value.code == "worker_lost"


def test_what_waits_is_bounded() -> None:
    one = line(most_bytes=2_000)
    stuck: list[bool] = []
    one.on_overflow = lambda: stuck.append(True)
    for no in range(20):
        one.push(grown(no, "x" * 30), 0.0)
    assert not one.is_overfull, "nobody reads yet: it has only just begun"
    for no in range(12):
        assert read(one) == grown(no, "x" * 30)
    assert not one.is_overfull
    for no in range(20, 40):
        one.push(grown(no, "x" * 30), 0.0)
    assert one.is_overfull and not stuck
    one.overflow()
    assert stuck == [True] and not one.is_overfull
    with pytest.raises(UnavailableError) as slow:
        read(one)
    assert slow.value.code == "slow_reader"


@pytest.mark.parametrize("how", [Line.overflow, lambda one: one.fail(UnavailableError("Nothing was heard."))])
def test_a_call_that_failed_keeps_nothing_of_its_answer(how: Callable[[Line], None]) -> None:
    one, text = line(), "".join(["x"] * 900)
    before = sys.getrefcount(text)
    for no in range(4):
        one.push(grown(no, text), 0.0)
    assert read(one) == grown(0, text) and sys.getrefcount(text) > before
    how(one)
    one.push(grown(4, text), 0.0)
    assert sys.getrefcount(text) == before


def test_a_reader_that_keeps_up_never_overflows() -> None:
    one = line(most_bytes=2_000)
    for no in range(200):
        one.push(grown(no, "x" * 30), 0.0)
        assert not one.is_overfull and read(one) == grown(no, "x" * 30)


def test_one_large_message_is_never_too_much() -> None:
    one = line(most_bytes=2_000)
    one.push(grown(0), 0.0)
    assert read(one) == grown(0)
    one.push(grown(1, "x" * 9_000), 0.0)
    assert not one.is_overfull


@pytest.mark.parametrize(("status", "kind"), [(400, InvalidRequestError), (503, UnavailableError)])
def test_a_workers_refusal_is_the_callers(status: int, kind: type[Exception]) -> None:
    one = line()
    one.push(Failed("c", status, "some_code", "It says why.", "messages"), 0.0)
    with pytest.raises(kind, match="It says why"):
        read(one)
    assert one.is_over


def test_an_answer_that_is_whole_stays_however_late_it_is_read() -> None:
    one = line()
    for news in (grown(0), ended(1)):
        one.push(news, 0.0)
    one.fail(UnavailableError("Nothing was heard.", code="worker_lost"))
    assert [read(one), read(one)] == [grown(0), ended(1)]


def test_a_message_that_means_nothing_is_no_end() -> None:
    one = line()
    with pytest.raises(TypeError):
        one.push(Failed("c", NOT_A_STATUS, "c", "m"), 0.0)
    assert not one.is_over
    one.push(ended(0), 0.0)
    assert read(one) == ended(0)
