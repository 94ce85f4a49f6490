"""When a worker changes over to another model: by tables of numbers, and by simulated days in which it never thrashes
and nobody starves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchsvc.batches import model_switch
from batchsvc.batches.model_switch import PATIENCE_S, STAY, Choice, Queue, Seat, Why, next_model, patience_s

A, B, C = "a", "b", "c"
_DAY_S = 3_000
BUSY = Seat(digest=A, served_s=1e6)
DRY = Seat(digest=A, served_s=1e6, dry_s=1e6)


def queue(digest: str, units: int = 1, **values: float) -> Queue:
    return replace(Queue(digest=digest, units=units, slack_s=1e6 if units else None, swap_s=10), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seat", "queues", "chosen"),
    [
        (BUSY, [queue(A)], None),
        (BUSY, [queue(A), queue(B)], None),
        (DRY, [queue(A, 0), queue(B)], Choice(B, Why.DRY)),
        (DRY, [queue(A, 0), queue(B, 0)], None),
        (replace(DRY, dry_s=9.9), [queue(A, 0), queue(B)], None),
        (DRY, [queue(A, 0), queue(B, wait_s=5), queue(C, wait_s=6)], Choice(C, Why.DRY)),
        (DRY, [queue(A, 0), queue(B, wait_s=5, slack_s=49), queue(C, wait_s=6)], Choice(B, Why.DRY)),
        (DRY, [queue(A, 0), queue(B, workers=1, wait_s=99)], None),
        (DRY, [queue(A, 0), queue(B, 2, workers=1, wait_s=9)], None),
        (DRY, [queue(A, 0), queue(B, 2, workers=1, wait_s=10)], Choice(B, Why.DRY)),
        (BUSY, [queue(A), queue(B, slack_s=50)], Choice(B, Why.DEADLINE)),
        (BUSY, [queue(A), queue(B, slack_s=51)], None),
        (BUSY, [queue(A, slack_s=40), queue(B, slack_s=50)], None),
        (BUSY, [queue(A, slack_s=-5), queue(B, slack_s=-6)], Choice(B, Why.DEADLINE)),
        (BUSY, [queue(A), queue(B, slack_s=-1, workers=1)], None),
        (replace(BUSY, served_s=STAY * 10 - 0.1), [queue(A), queue(B, slack_s=-1)], None),
        (BUSY, [queue(A), queue(B, wait_s=PATIENCE_S)], Choice(B, Why.WAITED)),
        (BUSY, [queue(A), queue(B, wait_s=PATIENCE_S - 1)], None),
        (BUSY, [queue(A), queue(B, wait_s=PATIENCE_S, swap_s=60)], None),
        (BUSY, [queue(A), queue(B, wait_s=700), queue(C, wait_s=800)], Choice(C, Why.WAITED)),
        (BUSY, [queue(B)], Choice(B, Why.UNLOADED)),
        (BUSY, [queue(B, 0), queue(C, 0)], Choice(B, Why.UNLOADED)),
        (BUSY, [], None),
        (Seat(digest=None), [queue(A, 0), queue(B)], Choice(B, Why.FIRST)),
        (Seat(digest=None), [queue(A), queue(B, workers=1)], Choice(A, Why.FIRST)),
        (Seat(digest=None), [queue(A, 0), queue(B, 0)], Choice(A, Why.FIRST)),
    ],
)
def test_decisions(seat: Seat, queues: list[Queue], chosen: Choice | None) -> None:
    assert next_model(seat, queues) == chosen


@dataclass
class Model:
    """One model in a simulated deployment: when work for it comes, and what waits. Times are seconds."""

    digest: str
    swap_s: int
    arrivals: dict[int, int]  # second -> units
    waiting: list[int] = field(default_factory=list)  # when each unit came
    served_at: int = 0  # when a worker last let go of it
    longest_s: int = 0  # that a unit has waited while none served it


@dataclass
class Day:
    """One worker, second by second: it takes a unit every `unit_s` seconds of the model that it serves."""

    models: list[Model]
    unit_s: int
    now: int = 0
    current: str = ""
    ready_at: int = 0
    dry_since: int | None = None
    swaps: list[tuple[int, int, Why]] = field(default_factory=list)  # when, how long, why
    served_before: list[int] = field(default_factory=list)  # how long the one that was left had been served
    free_at: int = 0

    def run(self, seconds: int) -> None:
        for self.now in range(seconds):
            for model in self.models:
                model.waiting += [self.now] * model.arrivals.get(self.now, 0)
            if self.now >= self.ready_at:
                self._serve()
                self._decide()

    def _serve(self) -> None:
        mine = next(model for model in self.models if model.digest == self.current)
        if mine.waiting and self.now >= self.free_at:
            mine.waiting.pop(0)
            self.free_at = self.now + self.unit_s
        if mine.waiting or self.now < self.free_at:
            self.dry_since = None
        elif self.dry_since is None:
            self.dry_since = self.now

    def _decide(self) -> None:
        seat = Seat(
            digest=self.current,
            served_s=self.now - self.ready_at,
            dry_s=0 if self.dry_since is None else self.now - self.dry_since,
        )
        queues = [
            Queue(
                digest=model.digest,
                units=len(model.waiting),
                wait_s=self.now - max(model.waiting[0], model.served_at) if model.waiting else 0,
                slack_s=1e6 if model.waiting else None,
                swap_s=model.swap_s,
            )
            for model in self.models
        ]
        choice = next_model(seat, queues)
        if choice is None:
            return
        left = next(model for model in self.models if model.digest == self.current)
        left.served_at = self.now
        chosen = next(model for model in self.models if model.digest == choice.digest)
        swap_s, oldest = chosen.swap_s, min(chosen.waiting, default=self.now)
        chosen.longest_s = max(chosen.longest_s, self.now - max(oldest, chosen.served_at))
        self.swaps.append((self.now, swap_s, choice.why))
        self.served_before.append(round(seat.served_s))
        self.current, self.ready_at, self.dry_since = choice.digest, self.now + swap_s, None
        self.free_at = self.ready_at


arrivals = st.dictionaries(st.integers(0, 2_000), st.integers(1, 40), max_size=12)
days = st.lists(st.tuples(st.integers(1, 60), arrivals), min_size=2, max_size=3)


@settings(max_examples=25)
@given(spec=days, unit_s=st.integers(1, 30))
def test_no_thrash_and_no_starvation(spec: list[tuple[int, dict[int, int]]], unit_s: int) -> None:
    models = [Model(chr(97 + number), swap_s, came) for number, (swap_s, came) in enumerate(spec)]
    day = Day(models, unit_s, current="a")
    day.run(_DAY_S)
    for (_, swap_s, why), served_s in zip(day.swaps, day.served_before, strict=True):
        if why is not Why.DRY:
            assert served_s >= STAY * swap_s, "a model with work isn't left before it has paid for the swap"
    changing = sum(swap_s for _, swap_s, _ in day.swaps)
    assert changing <= _DAY_S / 2 + 60, "at worst, half of the time goes into changing over: there was little to do"
    busy = [swap_s for _, swap_s, why in day.swaps if why is not Why.DRY]
    assert sum(busy) <= _DAY_S / (1 + STAY) + 60, "and a fifth, while there was always something to do"
    for model in models:
        bound = patience_s(Queue(digest="", swap_s=model.swap_s))
        bound += sum(_turn(other) for other in models) + 2 * unit_s
        waited = [model.longest_s] + ([day.now - max(model.waiting[0], model.served_at)] if model.waiting else [])
        if model.digest == day.current:
            waited = waited[:1]
        assert max(waited) <= bound, f"{model.digest} waited for {max(waited)} s without being served"


def _turn(model: Model) -> float:
    """The longest that one turn of another model takes when others have waited too long."""
    swap_s = max(model.swap_s, 1)
    return (1 + STAY) * 60 + swap_s


def test_two_trickles_cost_no_more_than_half_of_the_time() -> None:
    models = [Model(name, 20, dict.fromkeys(range(start, 6_000, 7), 1)) for name, start in ((A, 0), (B, 3))]
    day = Day(models, 1, current=A)
    day.run(6_000)
    left = zip(day.swaps, day.served_before, strict=True)
    assert all(why is not Why.DRY or served_s >= 20 for (_, _, why), served_s in left)
    assert sum(swap_s for _, swap_s, _ in day.swaps) < 3_000


def test_a_mutant_without_the_stay_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_switch, "STAY", 0.0)
    assert next_model(Seat(digest=A, served_s=0.0), [queue(A), queue(B, slack_s=-1)]) == Choice(B, Why.DEADLINE)
