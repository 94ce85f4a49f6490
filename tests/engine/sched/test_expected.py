"""Pending uses of prefixes: the books against a plain list, and what eviction makes of them."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.request import Expectation
from engine.sched.expected import BEYOND_WAITING, ExpectedUses, block_uses
from engine.sched.scheduler import _LANE_STRIDE
from tests.engine.oracle import request
from tests.engine.sched.harness import Harness

KEYS = [b"a", b"b", b"c"]
NAMES = ["x", "y"]


class BooksMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.expected = ExpectedUses()
        self.held: dict[str, dict[bytes, int]] = {}

    @rule(name=st.sampled_from(NAMES), uses=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 9)))
    def hold(self, name: str, uses: dict[bytes, int]) -> None:
        self.expected.hold(name, uses)
        self.held[name] = uses

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: str) -> None:
        assert self.expected.drop(name) == bool(self.held.pop(name, {}))

    @invariant()
    def the_largest_count_that_anybody_holds_decides(self) -> None:
        for key in KEYS:
            most = max((uses.get(key, 0) for uses in self.held.values()), default=0)
            assert self.expected.next_use(key) == (BEYOND_WAITING - most if most else math.inf)
        assert len(self.expected) == len({key for uses in self.held.values() for key in uses})


TestBooks = BooksMachine.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(
    num_keys=st.integers(0, 9),
    block_tokens=st.integers(1, 20),
    uses=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 5)), max_size=4),
)
def test_a_block_is_needed_by_whom_begins_with_all_of_it(
    num_keys: int, block_tokens: int, uses: list[tuple[int, int]]
) -> None:
    found = block_uses([bytes([i]) for i in range(num_keys)], block_tokens, uses)
    for i in range(num_keys):
        needing = [count for depth, count in uses if depth // block_tokens > i]
        assert found.get(bytes([i])) == (max(needing) if needing else None)


def test_announced_uses_lie_behind_all_waiting_requests_of_a_thousand_lanes() -> None:
    assert 1000 * _LANE_STRIDE < BEYOND_WAITING - 1_000_000
    assert BEYOND_WAITING - 1 != BEYOND_WAITING - 2, "a float tells the counts apart"


OLD, NEW = [1] * 9, [2] * 9


def hits_of(harness: Harness, tag: str, *prompts: list[int]) -> list[int | None]:
    for number, prompt in enumerate(prompts):
        harness.add(request(f"{tag}{number}", prompt, 1))
        harness.run()
    harness.assert_answers()
    return [harness.finished[f"{tag}{number}"].hit_tokens for number in range(len(prompts))]


def test_a_prefix_that_later_work_needs_outlives_one_that_nobody_needs() -> None:
    """8 blocks: two cached prefixes of 2 blocks; a filler of 5 takes the last of the one and spares the other."""
    for kept, lost in ((OLD, NEW), (NEW, OLD)):
        harness = Harness(num_blocks=8, max_running=1)
        harness.scheduler.expect("unit", Expectation(prompt_ids=tuple(kept), uses=((8, 1), (4, 3))))
        hits_of(harness, "first", OLD, NEW, [3] * 17)
        assert hits_of(harness, "again", kept) == [8]
        assert harness.scheduler.counters.hit_tokens == 8
        assert hits_of(harness, "lost", lost)[0] < 8


def test_the_shallow_part_that_more_need_stays_longest() -> None:
    harness = Harness(num_blocks=8, max_running=1)
    harness.scheduler.expect("a", Expectation(prompt_ids=tuple(OLD), uses=((8, 2),)))
    harness.scheduler.expect("b", Expectation(prompt_ids=tuple(NEW), uses=((8, 1),)))
    hits_of(harness, "first", OLD, NEW, [3] * 21)
    assert hits_of(harness, "again", OLD) == [8], "needed twice; of the other, needed once, blocks went"


def test_what_is_taken_back_or_belongs_to_another_project_is_not_kept() -> None:
    for salt, taken_back in (("", True), ("other", False)):
        harness = Harness(num_blocks=8, max_running=1)
        harness.scheduler.expect("unit", Expectation(prompt_ids=tuple(OLD), uses=((8, 1),), salt=salt))
        harness.scheduler.expect("next", Expectation(prompt_ids=tuple(NEW), uses=((8, 1),)))
        hits_of(harness, "first", OLD, NEW)
        if taken_back:
            harness.scheduler.expect("unit", None)
        hits_of(harness, "filler", [3] * 17)
        assert hits_of(harness, "again", NEW) == [8]
        assert len(harness.scheduler._expected) == (2 if taken_back else 4)


def test_waiting_requests_come_before_announced_ones() -> None:
    harness = Harness(num_blocks=8, max_running=1)
    hits_of(harness, "first", OLD, NEW)
    harness.scheduler.expect("unit", Expectation(prompt_ids=tuple(OLD), uses=((8, 99),)))
    harness.add(request("filler", [3] * 21, 2), request("waits", NEW, 2))
    harness.run()
    assert harness.finished["waits"].hit_tokens == 8
