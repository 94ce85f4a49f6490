"""The order of claims: fair between projects by weight, priority and deadline inside one, a capped panic lane."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import claim_rank
from batchsvc.batches.claim_rank import Candidate, by_rank, clock_after, late, latest_start_ms, vtime_of


def candidate(project: str = "a", **values: Any) -> Candidate:
    usual = {"batch_id": f"batch_{project}", "weight": 1, "vtime": 0, "priority": 0, "expires_ms": 1_000}
    return Candidate(project_id=project, **{**usual, "created_ms": 0, "latest_start_ms": None, **values})


def names(ranked: list[Candidate]) -> list[str]:
    return [batch.batch_id for batch in ranked]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Candidate], dict[str, int], int]:
    weights = draw(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 100), min_size=1))
    vtimes = {project: draw(st.integers(0, 10**7)) for project in weights}
    number = draw(st.integers(1, 12))
    rows = [
        candidate(
            project := draw(st.sampled_from(sorted(weights))),
            batch_id=f"batch_{index}",
            weight=weights[project],
            vtime=vtimes[project],
            priority=draw(st.integers(-3, 3)),
            expires_ms=draw(st.integers(0, 5)),
            created_ms=draw(st.integers(0, 5)),
            latest_start_ms=draw(st.none() | st.integers(0, 5)),
        )
        for index in range(number)
    ]
    held = draw(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2 * claim_rank.HELD_TOKENS)))
    return rows, held, draw(st.integers(0, 10**7))


@given(tables())
def test_ranking_keeps_every_candidate_and_every_rule(table: tuple[list[Candidate], dict[str, int], int]) -> None:
    rows, held, clock = table
    ranked = by_rank(rows, held, clock)
    assert sorted(names(ranked)) == sorted(names(rows))
    assert ranked == by_rank(list(reversed(rows)), held, clock), "the order of the rows doesn't matter"
    blocks = [project for project, _ in groupby(batch.project_id for batch in ranked)]
    assert len(blocks) == len(set(blocks)), "a project's batches stand together"

    def reached(project: str) -> tuple[bool, int]:
        batch = next(row for row in rows if row.project_id == project)
        tokens = held.get(project, 0)
        return tokens >= claim_rank.HELD_TOKENS, max(batch.vtime, clock) + vtime_of(tokens, batch.weight)

    assert [reached(project) for project in blocks] == sorted(reached(project) for project in blocks)
    for one, other in pairwise(ranked):
        if one.project_id == other.project_id:
            assert (-one.priority, one.expires_ms, one.created_ms) <= (
                -other.priority,
                other.expires_ms,
                other.created_ms,
            )
    urgent = late(rows, 3)
    assert {b.batch_id for b in urgent} == {
        b.batch_id for b in rows if (b.latest_start_ms or 9) <= 3 or b.latest_start_ms == 0
    }
    assert [b.expires_ms for b in urgent] == sorted(b.expires_ms for b in urgent)


def test_priority_counts_inside_a_project_alone() -> None:
    mine, other = candidate("a", batch_id="low"), candidate("b", batch_id="other", vtime=5)
    high = candidate("a", batch_id="high", priority=9, expires_ms=9_000)
    assert names(by_rank([mine, other, high], {}, 0)) == ["high", "low", "other"]
    assert names(by_rank([mine, other, high], {"a": 1}, 0)) == ["other", "high", "low"]


def test_who_holds_too_much_comes_last_but_isnt_left_out() -> None:
    rows = [candidate("a", weight=1_000_000), candidate("b", vtime=10**6)]
    assert names(by_rank(rows, {"a": claim_rank.HELD_TOKENS - 1}, 0)) == ["batch_a", "batch_b"]
    assert names(by_rank(rows, {"a": claim_rank.HELD_TOKENS}, 0)) == ["batch_b", "batch_a"]
    assert names(by_rank(rows[:1], {"a": 10**9}, 0)) == ["batch_a"]


@dataclass
class Project:
    weight: int
    backlog: int
    vtime: int = 0
    served: int = 0
    running: list[int] = field(default_factory=list)


class Market:
    """Slots that run one unit each: `lease` fills a slot as claims do, `finish` ends the unit that ran longest."""

    def __init__(self, projects: dict[str, Project]) -> None:
        self.projects = projects
        self.clock = 0
        self.order: list[tuple[str, int]] = []

    def lease(self, tokens: int) -> str | None:
        rows = [
            candidate(name, weight=project.weight, vtime=project.vtime)
            for name, project in self.projects.items()
            if project.backlog
        ]
        if not rows:
            return None
        active = [p.vtime for p in self.projects.values() if p.backlog or p.running]
        self.clock = clock_after(self.clock, active)
        held = {name: sum(project.running) for name, project in self.projects.items()}
        name = by_rank(rows, held, self.clock)[0].project_id
        for row in rows:
            self.projects[row.project_id].vtime = max(row.vtime, self.clock)
        project = self.projects[name]
        project.backlog -= 1
        project.running.append(tokens)
        self.order.append((name, tokens))
        return name

    def finish(self) -> None:
        name, tokens = self.order.pop(0)
        project = self.projects[name]
        project.running.remove(tokens)
        project.vtime += vtime_of(tokens, project.weight)
        project.served += tokens


sizes = st.lists(st.integers(1, 1_000), min_size=30, max_size=120)


@given(sizes, st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
def test_two_busy_projects_get_tokens_by_weight(tokens: list[int], slots: int, weight_a: int, weight_b: int) -> None:
    market = Market({"a": Project(weight_a, 10**6), "b": Project(weight_b, 10**6)})
    for number, size in enumerate(tokens):
        if number >= slots:
            market.finish()
        market.lease(size)
    had = {name: p.served + sum(p.running) for name, p in market.projects.items()}
    # the one that is behind is always served next, so no more than one unit of each lies between them
    apart = abs(had["a"] / weight_a - had["b"] / weight_b)
    assert apart <= max(tokens) / weight_a + max(tokens) / weight_b + 1


@given(sizes, st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
def test_a_flood_delays_a_newcomer_by_one_slot_and_its_idle_time_is_no_credit(
    tokens: list[int], slots: int, weight_a: int, weight_b: int
) -> None:
    """A has run for long; B comes with a few units. It is served next, then in proportion to its weight."""
    market = Market({"a": Project(weight_a, 10**6), "b": Project(weight_b, 0)})
    for _ in range(slots):
        market.lease(1_000)
    for size in tokens:
        market.finish()
        market.lease(size)
    before = market.projects["a"].served
    market.projects["b"].backlog = 10
    claims = []
    while market.projects["b"].backlog:
        market.finish()
        claims.append(market.lease(1_000))
        assert len(claims) < 10 * (1 + 9 * 2 + slots * 2), "B's wait is bounded by its weight"
    # A's running units count against it, so B is never behind more than A's share of what B got, and one unit
    got_a = sum(claim == "a" for claim in claims)
    assert got_a <= 10 * weight_a / weight_b + 1
    assert market.projects["b"].vtime >= market.clock - vtime_of(0, 1), "the newcomer is level with the clock"
    assert market.projects["a"].served >= before


@given(st.lists(st.booleans(), max_size=200))
def test_the_panic_lane_never_has_more_than_its_share(wishes: list[bool]) -> None:
    credit = panic = 0
    for number, _ in enumerate(wishes, 1):
        if credit >= claim_rank.PANIC_PRICE:
            credit, panic = credit - claim_rank.PANIC_PRICE, panic + 1
        elif credit + claim_rank.PANIC_GAIN <= claim_rank.PANIC_MOST:
            credit += claim_rank.PANIC_GAIN
        assert panic <= 0.3 * number
    assert panic >= 0.3 * len(wishes) - 2


@given(st.lists(st.integers(0, 100)), st.integers(0, 100))
def test_the_clock_never_goes_back(vtimes: list[int], clock: int) -> None:
    after = clock_after(clock, vtimes)
    assert after >= clock
    assert all(vtime >= after or vtime < clock for vtime in vtimes)
    assert after == clock or after in vtimes


def test_a_batch_is_late_before_its_work_no_longer_fits() -> None:
    hour = 3_600_000

    def latest(remaining: int, rate: float | None) -> int:
        return latest_start_ms(created_ms=0, expires_ms=hour, remaining_tokens=remaining, tokens_per_s=rate)

    assert latest(0, None) == latest(10**9, None) == hour * 3 // 4
    assert latest(0, 100.0) == hour * 9 // 10
    assert latest(60_000, 100.0) == hour * 9 // 10 - 600_000
    assert latest(10**9, 100.0) < 0, "too much for the window: it is late from the start"
