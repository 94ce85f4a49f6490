"""Interactive calls beside units in one worker: order, ends, and the units that go on undisturbed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from queue import Empty
from typing import Any

import pytest

from batchsvc.batches.lifecycle import Status
from batchsvc.interactive.wire import Ended, Failed, Grown, NewCall, News, Taken, encode_news
from engine.errors import RequestError
from engine.fake import FakeEngine
from engine.request import Completion, FinishReason, Lane, NewText, SpelledLogprob, Usage
from tests.workers.conftest import World
from tests.workers.test_engine_run import completed, until, worker
from workers.interactive import CallSource, Said


class NoEngine:
    """Notes what it is asked to abort."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def wake(self) -> None:
        pass

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids


def source(most_calls: int = 2) -> tuple[CallSource, NoEngine]:
    engine: Any = NoEngine()
    return CallSource(engine=engine, owner="w", most_calls=most_calls, fingerprint="fp"), engine


def call(call_id: str = "c1", *, api: str = "a", **params: Any) -> NewCall:
    params = {"max_tokens": 4, "temperature": 0.0} | params
    return NewCall(id=call_id, api=api, prompt_ids=[1, 2, 3], params=params, seed=7, salt="s", streams=True)


def said(calls: CallSource) -> list[Said]:
    found = []
    while True:
        try:
            found.append(calls.outbox.get_nowait())
        except Empty:
            return found


def news(calls: CallSource) -> list[News]:
    return [one.news for one in said(calls)]


def done(reason: FinishReason = FinishReason.STOP, **more: Any) -> Completion:
    return Completion(request_id="c1", token_ids=(1,), text="ab", finish_reason=reason, usage=Usage(3, 0, 1), **more)


def test_a_call_runs_before_all_batch_work_and_whatever_the_room() -> None:
    calls, _ = source()
    calls.begin(call(n=3, stop=["x"]))
    (request,) = calls.take(0)
    assert (request.lane, request.salt, request.n, request.streams) == (Lane.INTERACTIVE, "s", 3, True)
    assert request.params.stop == ("x",) and request.params.seed == 7 and calls.take(9) == []


def test_what_is_said_of_a_call_is_numbered_and_in_order() -> None:
    calls, _ = source()
    calls.begin(call())
    calls.grow("c1", [NewText("a")])
    calls.grow("c1", [NewText("b")])
    calls.finish(replace(done(), text="abc"))
    assert news(calls) == [
        Taken("c1", "w"),
        Grown("c1", 0, (NewText("a"),)),
        Grown("c1", 1, (NewText("b"),)),
        Ended("c1", 2, replace(done(), text="c"), "fp", is_rest=True),  # what was said isn't said again
    ]
    assert calls.num_open() == 0


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_the_bytes_that_are_said_of_a_call_grow_as_its_answer_does(num_logprobs: int) -> None:
    """The same for each token, however many came before it."""
    found = SpelledLogprob(b"word", -1.25, ((b"word", -1.25),) * num_logprobs)
    logprobs = (found,) if num_logprobs else ()

    def num_bytes(num_tokens: int) -> int:
        calls, _ = source()
        calls.begin(call())
        for _ in range(num_tokens - 1):
            calls.grow("c1", [NewText("word", 0, logprobs)])
        whole = replace(done(), text="word" * num_tokens)
        calls.finish(replace(whole, logprobs=logprobs * num_tokens) if logprobs else whole)
        return sum(len(encode_news(one)) for one in news(calls))

    sizes = [num_bytes(num_tokens) for num_tokens in (1_000, 2_000, 3_000, 4_000)]
    each = {second - first for first, second in pairwise(sizes)}
    assert len(each) == 1 and sizes[-1] < 4_000 * (60 + 120 * bool(num_logprobs)), sizes


def test_there_is_room_for_so_many_calls_and_none_while_draining() -> None:
    calls, _ = source(most_calls=2)
    calls.begin(call("c1"))
    assert calls.room() == 1
    calls.begin(call("c2", api="b"))
    assert calls.room() == 0 and calls.open_calls() == {"a": ["c1"], "b": ["c2"]}
    calls.stop(["c1"])
    assert calls.room() == 1
    calls.is_draining = True
    assert calls.room() == 0


def test_a_stopped_call_leaves_the_engine_and_nothing_more_is_said() -> None:
    calls, engine = source()
    calls.begin(call())
    said(calls)
    calls.stop(["c1", "unknown"])
    assert engine.aborted == ["c1"] and calls.take(9) == []
    calls.finish(done())
    assert news(calls) == []
    calls.grow("c1", [NewText("late")])
    assert engine.aborted == ["c1", "c1"], "it came into the engine all the same"


def test_calls_of_a_process_that_is_gone_are_stopped() -> None:
    calls, engine = source()
    calls.begin(call("c1", api="a"))
    calls.begin(call("c2", api="b"))
    calls.stop_for("a")
    assert engine.aborted == ["c1"] and calls.num_open() == 1


def test_failures_have_the_status_that_a_line_would_have() -> None:
    calls, _ = source()
    for ended, status in (("context_length_exceeded", 400), ("kv_capacity_exceeded", 500), (None, 500)):
        calls.begin(call())
        calls.finish(done(FinishReason.ERROR, error_code=ended, error_message="No." if ended else None))
        *_, failed = news(calls)
        assert isinstance(failed, Failed) and failed.status == status
    calls.begin(call(temperature=9.0))  # no request can be made of it
    *_, failed = news(calls)
    assert isinstance(failed, Failed) and (failed.status, failed.param) == (400, "temperature")
    calls.begin(call())
    calls.refuse("c1", RequestError("No.", code="invalid_value", param="messages"))
    *_, failed = news(calls)
    assert isinstance(failed, Failed) and failed.param == "messages" and calls.num_open() == 0


@pytest.mark.parametrize("params", [[], None, {"max_tokens": "x"}, {"n": "many"}, {"stop": 5}])
def test_a_message_that_is_shaped_like_a_call_and_is_none_ends_nothing(params: Any) -> None:
    calls, _ = source()
    calls.begin(replace(call(), params=params))
    *_, failed = news(calls)
    assert isinstance(failed, Failed) and failed.status in (400, 500) and calls.num_open() == 0


def test_a_worker_that_stops_says_it_of_every_call() -> None:
    calls, engine = source()
    for call_id in ("c1", "c2"):
        calls.begin(call(call_id))
    said(calls)
    calls.stop_all()
    assert [(one.call_id, one.status, one.code) for one in news(calls)] == [  # type: ignore[union-attr]
        ("c1", 503, "worker_lost"),
        ("c2", 503, "worker_lost"),
    ]
    assert sorted(engine.aborted) == ["c1", "c2"]


def test_units_run_on_beside_calls(sqlite_world: World) -> None:
    batch = sqlite_world.add_batch(num_lines=24)
    with worker(sqlite_world, FakeEngine(None, step_tokens=8)) as run:
        for number in range(5):
            run._calls.begin(call(f"c{number}", api="nobody", max_tokens=8))
        until(completed(sqlite_world, batch), "all lines")
        until(lambda: run._calls.num_open() == 0, "the calls have ended, or nobody waits for them")
    assert sqlite_world.batch(batch).status == Status.IN_PROGRESS and sqlite_world.batch(batch).completed == 24
