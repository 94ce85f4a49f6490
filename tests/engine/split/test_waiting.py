"""Nothing waits for ever: a side whose peers are gone, hang, or lose its prompts again and again goes on by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import PeerError, RequestError
from engine.request import Completion, FinishReason, Lane, Request, SamplingParams, StepOutput
from engine.split import prefill, shared
from tests.engine.split.halves import Halves, make_engine

pytestmark = pytest.mark.usefixtures("_no_dozing")

PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LONG = Request(id="long", prompt_ids=list(range(3, 163)), params=PARAMS)
SHORT = Request(id="short", prompt_ids=[5, 6, 7], params=PARAMS)
Make = Callable[..., Halves]


@pytest.fixture
def make(tmp_path: Path, fused_model: Path) -> Iterator[Make]:
    made: list[Halves] = []

    def build(*, prefills: int = 1, patience_s: float = 3600) -> Halves:
        engines = [make_engine(fused_model) for _ in range(prefills)]
        halves = Halves(tmp_path, make_engine(fused_model), engines, patience_s=patience_s)
        made.append(halves)
        return halves

    yield build
    for halves in made:
        halves.close()


def turns_until(halves: Halves, is_so: Callable[[], bool]) -> list[Completion]:
    found: list[Completion] = []
    for _ in range(20_000):
        if is_so():
            return found
        found += halves.turn()
    raise AssertionError("it never happens")


def is_asked(halves: Halves) -> bool:
    return any(peer.asked for peer in halves.decode._peers)


def test_who_waited_in_vain_computes_its_prompts_itself(make: Make, fused_model: Path) -> None:
    halves = make(prefills=0, patience_s=0)
    found = halves.run([LONG])
    assert found["long"].token_ids == next(iter(make_engine(fused_model).run([LONG]))).token_ids
    assert halves.decode.split.own_prompts == 1
    assert not halves.decode.is_ready(), "it doesn't take more work for that"


def test_what_a_lost_engine_had_is_computed_here_where_there_is_no_other(make: Make, fused_model: Path) -> None:
    halves = make(patience_s=0)
    turns_until(halves, halves.decode.is_ready)
    halves.decode.add(LONG)
    halves.decode.step()  # the prefill side isn't stepped any more, so it never answers
    assert is_asked(halves)
    halves.leave(halves.prefills[0])
    (ended,) = turns_until(halves, lambda: not halves.decode.has_work())
    assert ended.token_ids == next(iter(make_engine(fused_model).run([LONG]))).token_ids
    assert (halves.decode.split.lost_peers, halves.decode.split.own_prompts) == (1, 1)
    assert halves.decode._grants.open_blocks == 0
    halves.decode._engine.scheduler.check_integrity()


def test_nobody_who_waits_for_an_answer_waits_for_a_prefill_engine(make: Make) -> None:
    halves = make(prefills=0)
    halves.decode.add(LONG)
    halves.decode.add(replace(LONG, id="call", prompt_ids=list(range(200, 260)), lane=Lane.INTERACTIVE))
    ended = turns_until(halves, lambda: halves.decode.num_unfinished() == 1)
    assert [done.request_id for done in ended] == ["call"]
    assert halves.decode.split.own_prompts == 1


def test_a_prompt_that_is_lost_again_and_again_is_computed_here(make: Make) -> None:
    """It may be what ends them: then it must not end all there are."""
    halves = make(prefills=4)
    halves.decode.add(LONG)
    lost = 0
    for _ in range(20_000):
        if not halves.decode.has_work():
            break
        for side in list(halves.prefills):
            side._welcome()
            peers = {peer.link.name for peer in halves.decode._peers if peer.asked}
            if side.address in peers:
                halves.leave(side)
                lost += 1
        halves.decode.step()
    assert lost == 3
    assert halves.decode.is_ready()
    assert halves.decode.split.own_prompts == 1


def test_what_needs_nobody_does_not_stand_behind_what_does(make: Make) -> None:
    halves = make()
    cached = Request(id="cached", prompt_ids=list(range(100, 132)), params=PARAMS)
    halves.run([cached])
    for number in range(9):  # more than may wait at the prefill side, which isn't stepped from now on
        halves.decode.add(replace(LONG, id=str(number), prompt_ids=[number + 3] * 64))
    halves.decode.step()
    assert len(halves.decode._queue) > 0
    halves.decode.add(SHORT)
    halves.decode.add(cached)
    ended: list[str] = []
    for _ in range(200):
        ended += [done.request_id for done in halves.decode.step().completions]
    assert sorted(ended) == ["cached", "short"]


def test_a_wait_is_not_shown_as_work(make: Make) -> None:
    halves = make(prefills=0)
    halves.decode.add(LONG)
    assert halves.decode.step().idle_s > 0
    halves.decode.add(SHORT)
    assert halves.decode.step().idle_s == 0


def test_an_engine_that_gets_nowhere_is_told_by_silence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = make()
    (side,) = halves.prefills
    monkeypatch.setattr(side._engine, "step", StepOutput)
    halves.decode.add(LONG)
    turns_until(halves, side._engine.has_work)
    moved_s = side.moved_s
    for _ in range(5):
        halves.turn()
    assert side.moved_s == moved_s
    assert not side._hangs()
    side.hung_s = 0.0
    assert side._hangs()
    (peer,) = side._peers
    assert not peer.link._may_beat()
    monkeypatch.undo()
    turns_until(halves, lambda: not halves.decode.has_work())
    side.step()
    assert side.moved_s > moved_s


def test_an_error_of_one_connection_is_not_the_end_of_all(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = shared.SharedListener.accept, [PeerError("Too many open files."), MemoryError()]

    def failing(listener: shared.SharedListener) -> shared.SharedWire:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(shared.SharedListener, "accept", failing)
    halves = make()
    assert halves.run([LONG])["long"].finish_reason is FinishReason.LENGTH
    assert halves.decode.split.handed_over == 1
    assert not failures


def test_no_more_are_served_than_there_is_room_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_MOST_PEERS", 0)
    halves = make()
    turns_until(halves, lambda: "serves 0 others already" in (halves.decode.note() or ""))
    assert halves.prefills[0].num_peers == 0


def test_a_prompt_that_an_engine_refuses_is_computed_where_it_came_from(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = make()
    (side,) = halves.prefills

    def refuse(request: Request) -> None:
        raise RequestError("It can't be run.", code="invalid_value")

    monkeypatch.setattr(side._engine, "add", refuse)
    assert halves.run([LONG])["long"].finish_reason is FinishReason.LENGTH
    assert halves.decode.split.handed_over == 0
    assert side._busy_blocks == 0
