"""What crashes say: splitting finds the poison line, random kills condemn nobody, the brake acts on repetition."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import poison
from batchsvc.batches.poison import Verdict, halves, is_too_much, judge, note


@given(st.sets(st.integers(0, 600), min_size=2))
def test_halves_share_out_every_line_once(lines: set[int]) -> None:
    lacking = sum(1 << line for line in lines)
    first, second = halves(lacking)
    assert first | second == lacking and first & second == 0
    assert abs(first.bit_count() - second.bit_count()) <= 1
    assert first.bit_length() <= (second & -second).bit_length() - 1, "the first lines come first"


class Lab:
    """Units as (lines, crash_count, is_suspect), run as claims do: suspects alone, the biggest first."""

    def __init__(self, num_lines: int) -> None:
        self.units: list[tuple[int, int, bool]] = [((1 << num_lines) - 1, 0, False)]
        self.done: set[int] = set()
        self.condemned: set[int] = set()
        self.crashes = 0

    def pick(self) -> int:
        order = [(not suspect, -lines.bit_count()) for lines, _, suspect in self.units]
        return order.index(min(order))

    def crash(self, index: int) -> None:
        lines, count, suspect = self.units.pop(index)
        self.crashes, count = self.crashes + 1, count + 1
        match judge(crash_count=count, is_suspect=suspect, num_lacking=lines.bit_count()):
            case Verdict.KEEP:
                self.units.append((lines, count, suspect))
            case Verdict.WATCH:
                self.units.append((lines, 0, True))
            case Verdict.SPLIT:
                self.units += [(half, 0, True) for half in halves(lines)]
            case Verdict.POISON:
                self.condemned.add(lines.bit_length() - 1)

    def complete(self, index: int) -> None:
        lines, _, _ = self.units.pop(index)
        self.done |= {line for line in range(lines.bit_length()) if lines >> line & 1}


@given(st.integers(1, 512), st.data())
def test_exactly_the_poison_lines_are_condemned(num_lines: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, num_lines - 1), max_size=3))
    lab = Lab(num_lines)
    streak = worst = 0
    while lab.units:
        index = lab.pick()
        if any(lab.units[index][0] >> line & 1 for line in bad):
            lab.crash(index)
            streak += 1
        else:
            lab.complete(index)
            streak = 0
        worst = max(worst, streak)
    assert lab.condemned == bad and lab.done == set(range(num_lines)) - bad
    if len(bad) == 1:
        assert lab.crashes <= 12
        assert worst <= poison.BRAKE_MOST or num_lines == 1, "one poison line doesn't set off the brake"


@pytest.mark.parametrize("seed", range(40))
def test_a_hundred_kills_at_random_condemn_nobody(seed: int) -> None:
    """A kill hits a unit before its first part in 3 of 10 cases, a suspect, whose lines count at once, in 1 of 20."""
    chance = random.Random(seed)
    lab = Lab(chance.choice((8, 64, 512)))
    times: list[int] = []
    for kill in range(100):
        if not lab.units:
            break
        index = lab.pick()
        lines, _, is_suspect = lab.units[index]
        if chance.random() < (0.05 if is_suspect else 0.3):
            lab.crash(index)
            times = note(times, kill * 6_000)
        else:  # a few lines count, then the kill comes
            for _ in range(min(lines.bit_count(), 4)):
                lab.done.add((lines & -lines).bit_length() - 1)
                lines &= lines - 1
            lab.units[index] = (lines, 1, False)
            if not lines:
                del lab.units[index]
            times = []
        assert not is_too_much(times), "nor do they set off the brake"
    assert lab.condemned == set()


@pytest.mark.parametrize(
    ("crash_count", "is_suspect", "num_lacking", "verdict"),
    [
        (1, False, 512, Verdict.KEEP),
        (2, False, 512, Verdict.SPLIT),
        (1, True, 256, Verdict.SPLIT),
        (1, False, 1, Verdict.KEEP),
        (2, False, 1, Verdict.WATCH),
        (1, True, 1, Verdict.KEEP),
        (2, True, 1, Verdict.POISON),
        (3, True, 1, Verdict.POISON),
    ],
)
def test_verdicts(crash_count: int, is_suspect: bool, num_lacking: int, verdict: Verdict) -> None:
    assert judge(crash_count=crash_count, is_suspect=is_suspect, num_lacking=num_lacking) is verdict


def test_the_brake_counts_incidents_of_the_last_ten_minutes() -> None:
    times: list[int] = []
    for at_s in (0, 1, 3, 60, 120):  # the first three are one incident
        times = note(times, at_s * 1000)
    assert len(times) == 3 and not is_too_much(times)
    assert is_too_much(note(times, 180_000))
    assert len(note(times, 600_001)) == 3, "what is older has no weight"
    assert note([0], 1, is_incident=False) == [0, 1]
