"""The engine of test mode: slow lines sleep outside of it, failing ones fail, the rest is answered at once."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.request import Completion, FinishReason, Request, SamplingParams
from workers import magic_engine
from workers.magic_engine import MagicEngine


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    moment = [1000.0]
    monkeypatch.setattr(magic_engine, "monotonic_s", lambda: moment[0])
    return moment


def request(number: int, magic: str = "", epoch: int = 1) -> Request:
    return Request(
        id=f"unit_1:{epoch}:{number}",
        prompt_ids=[number + 1, 3_000_000],
        params=SamplingParams(max_tokens=4),
        magic=magic,
    )


def ended(engine: MagicEngine, steps: int = 5) -> list[Completion]:
    return [completion for _ in range(steps) for completion in engine.step().completions]


def test_a_slow_line_sleeps_at_the_door_and_is_no_work_of_the_engine(now: list[float]) -> None:
    engine = MagicEngine(on_expire=lambda _id: None)
    engine.add(request(0, "test:slow 60"))
    engine.add(request(1))
    assert [completion.request_id for completion in ended(engine)] == ["unit_1:1:1"]
    assert engine.has_work()
    assert engine.stats().waiting + engine.stats().running == 0  # nobody takes it for a hang
    now[0] += 61
    [slow] = ended(engine)
    assert (slow.request_id, slow.finish_reason) == ("unit_1:1:0", FinishReason.LENGTH)
    assert not engine.has_work()


@pytest.mark.parametrize("magic", ["test:slow 60", "test:expire"])
def test_what_sleeps_can_be_taken_out(now: list[float], magic: str) -> None:
    engine = MagicEngine(on_expire=lambda _id: None)
    engine.add(request(0, magic))
    engine.abort("unit_1:1:0")
    assert [completion.finish_reason for completion in ended(engine)] == [FinishReason.ABORT]
    now[0] += 100
    assert not engine.has_work()


def test_a_line_that_is_to_expire_is_told_once_and_never_answered(now: list[float]) -> None:
    told: list[str] = []
    engine = MagicEngine(on_expire=told.append)
    engine.add(request(0, "test:expire"))
    assert ended(engine) == []
    now[0] += 1e6
    assert ended(engine) == []
    assert told == ["unit_1:1:0"]


def test_a_failing_line_has_the_code_that_was_asked_for() -> None:
    engine = MagicEngine(on_expire=lambda _id: None)
    engine.add(request(0, "test:fail invalid_logits"))
    [failed] = ended(engine)
    assert (failed.finish_reason, failed.error_code) == (FinishReason.ERROR, "invalid_logits")


def test_a_flaky_line_fails_so_often_whoever_owns_its_unit() -> None:
    engine = MagicEngine(on_expire=lambda _id: None)
    seen = []
    for epoch in (1, 1, 2, 3):
        engine.add(request(0, "test:flaky 2", epoch))
        seen += [completion.finish_reason for completion in ended(engine)]
    assert seen == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH, FinishReason.ERROR]


def test_a_misspelt_spell_is_refused() -> None:
    with pytest.raises(RequestError, match="test:slow takes a number"):
        MagicEngine(on_expire=lambda _id: None).add(request(0, "test:slow soon"))
