"""The response to one call, on a line that the test feeds: who is charged when a client leaves or reads slowly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import orjson
import pytest
import structlog
from sqlalchemy.exc import OperationalError

from batchsvc.batches.answers import Answered
from batchsvc.batches.endpoints import CHAT
from batchsvc.billing.call_service import PricedCall
from batchsvc.billing.pricing import STANDARD_TIER, shipped_book
from batchsvc.interactive import service
from batchsvc.interactive.asked import Asked
from batchsvc.interactive.call_response import CallResponse
from batchsvc.interactive.line import Line, lost
from batchsvc.interactive.service import PreparedCall
from batchsvc.interactive.wire import Ended, Grown
from batchsvc.settings import Settings
from engine.request import Completion, FinishReason, NewText, Usage
from tests.batchsvc.interactive.conftest import call_settings

LIVENESS_S = 30
WHOLE = Ended(
    "c",
    2,
    Completion(request_id="c", token_ids=(), text="abc", finish_reason=FinishReason.STOP, usage=Usage(3, 0, 3)),
)
TEXTS = (Grown("c", 0, (NewText("a"),)), Grown("c", 1, (NewText("b"),)))


class OneLine:
    """A switchboard whose worker has the call already."""

    id = "api"

    def __init__(self) -> None:
        self.line = Line("c", most_bytes=1_000, now_s=0.0)

    async def connect(self, _digest: str, _call: object) -> Line:
        return self.line

    def room_for(self, _num_logprobs: int) -> AbstractContextManager[None]:
        return nullcontext()

    def hang_up(self, _line: Line) -> None:
        pass


class Talk:
    """One call and its client, who takes what is sent while it `reads`, and leaves when it is told to."""

    def __init__(self, *, streams: bool = True, settings: Settings | None = None) -> None:
        self.board, self.reads, self.leaves = OneLine(), asyncio.Event(), asyncio.Event()
        self.got: list[bytes] = []
        self.status = 0
        self.reads.set()
        priced = PricedCall(
            id="call_c",
            project_id="p",
            api_key_id="k",
            model_id="m",
            endpoint=CHAT,
            price_version=1,
            rates=shipped_book().rates["default", STANDARD_TIER],
            created_ms=1,
        )
        asked = Asked(prompt_ids=[1, 2, 3], params={"max_tokens": 3})
        call = PreparedCall(
            digest="d", priced=priced, asked=asked, streams=streams, includes_usage=False, salt="s", is_held=False
        )
        nothing: Any = None
        board: Any = self.board
        settings = settings or call_settings("sqlite:///nowhere.sqlite3", "redis://127.0.0.1:9")
        self._response = CallResponse(board, nothing, settings, call, ExitStack())
        self._task = asyncio.create_task(
            self._response({"type": "http", "path": CHAT, "headers": []}, self._receive, self._send)
        )

    def say(self, *news: Grown | Ended) -> None:
        for one in news:
            self.board.line.push(one, 0.0)

    async def end(self) -> str:
        """What was sent, when all is over."""
        await asyncio.wait_for(self._task, LIVENESS_S)
        return b"".join(self.got).decode()

    async def _receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        await self.reads.wait()
        self.got.append(message.get("body", b""))


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> list[Ended]:
    """What was charged; a charge takes a moment."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    found: list[Ended] = []

    def charge(_db: object, call: PreparedCall, ended: Ended) -> Answered:
        time.sleep(0.05)
        found.append(ended)
        return answered(call, ended)

    monkeypatch.setattr(service, "charge", charge)
    return found


def answered(call: PreparedCall, ended: Ended) -> Answered:
    return Answered(
        line_ident="c",
        model="m",
        created_s=1,
        params=call.asked.params,
        text=ended.completion.text,
        finish_reason="stop",
        vectors=(),
        choices=ended.completion.answers,
        input_tokens=3,
        cached_tokens=0,
        output_tokens=3,
        cost_nanos=1,
    )


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * LIVENESS_S))


def test_a_client_that_leaves_before_the_answer_is_whole_is_not_charged(charged: list[Ended]) -> None:
    async def test() -> None:
        talk = Talk()
        talk.say(*TEXTS)
        await until(lambda: talk.got)
        talk.leaves.set()
        assert "[DONE]" not in await talk.end() and charged == []

    run(test)


def test_a_client_that_leaves_what_is_whole_unread_is_charged(charged: list[Ended]) -> None:
    async def test() -> None:
        talk = Talk()
        talk.reads.clear()
        talk.say(*TEXTS)
        await until(lambda: talk.status)
        talk.say(WHOLE)
        talk.leaves.set()
        await talk.end()
        assert charged == [WHOLE] and not talk.got

    run(test)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_during_the_charge_is_charged(
    charged: list[Ended], streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        charge, begun, goes = service.charge, asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def watched(*given: Any) -> Answered:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(goes.wait(), loop).result(LIVENESS_S)
            return charge(*given)

        monkeypatch.setattr(service, "charge", watched)
        talk = Talk(streams=streams)
        talk.say(*TEXTS, WHOLE)
        await begun.wait()
        talk.leaves.set()
        await asyncio.sleep(0.05)
        goes.set()
        assert "[DONE]" not in await talk.end() and charged == [WHOLE]

    run(test)


def test_a_client_that_takes_nothing_of_a_whole_answer_is_charged_and_ended(charged: list[Ended]) -> None:
    settings = call_settings("sqlite:///nowhere.sqlite3", "redis://127.0.0.1:9", interactive_stall_s=0.2)

    async def test() -> None:
        talk = Talk(settings=settings)
        talk.reads.clear()
        talk.say(*TEXTS, WHOLE)
        await talk.end()
        assert charged == [WHOLE] and not talk.got

    run(test)


def test_an_answer_that_is_whole_in_time_is_sent_however_slowly_it_is_read(charged: list[Ended]) -> None:
    settings = call_settings("sqlite:///nowhere.sqlite3", "redis://127.0.0.1:9", interactive_timeout_s=0.2)

    async def test() -> None:
        talk = Talk(settings=settings)
        talk.reads.clear()
        talk.say(*TEXTS, WHOLE)
        await asyncio.sleep(0.4)
        talk.reads.set()
        said = await talk.end()
        assert "[DONE]" in said and "error" not in said and charged == [WHOLE]

    run(test)


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_that_never_ends_is_ended_in_time_and_not_charged(charged: list[Ended], streams: bool) -> None:
    """However much of it comes all the time."""
    settings = call_settings("sqlite:///nowhere.sqlite3", "redis://127.0.0.1:9", interactive_timeout_s=0.2)

    async def test() -> None:
        talk, no = Talk(settings=settings, streams=streams), 0
        while not talk._task.done():
            talk.say(Grown("c", no, (NewText("a"),)))
            no += 1
            await asyncio.sleep(0.001)
        said = await talk.end()
        assert '"code":"call_timeout"' in said and charged == [] and talk.status == (200 if streams else 503)

    run(test)


def test_a_client_that_reads_nothing_of_a_refusal_holds_its_call_up_no_longer_than_any_other(
    charged: list[Ended],
) -> None:
    """It may have left an answer of its connection unread before."""
    settings = call_settings("sqlite:///nowhere.sqlite3", "redis://127.0.0.1:9", interactive_stall_s=0.2)

    async def test() -> None:
        talk = Talk(settings=settings)
        talk.reads.clear()
        talk.board.line.fail(lost())
        await talk.end()
        assert not talk.got and charged == []

    run(test)


@pytest.mark.parametrize(("texts", "says"), [(TEXTS, "its end isn't given"), ((), "and isn't given")])
def test_what_is_said_of_a_database_that_is_away_is_true(
    charged: list[Ended], texts: tuple[Grown, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_given: object) -> Answered:
        raise OperationalError("", None, Exception())

    monkeypatch.setattr(service, "charge", fail)

    async def test() -> None:
        talk = Talk()
        talk.say(*texts)
        talk.say(Ended("c", len(texts), WHOLE.completion))
        *_, last = (await talk.end()).strip().split("\n\n")
        error = orjson.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "database_unavailable" and says in error["message"]
        assert talk.status == (200 if texts else 503)

    run(test)
