"""The plan of a window against brute-force oracles: folding, prices, units and prefix uses."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sched.order import PlannedRow, WindowPlan, common_prefix_tokens, plan_window


def pack(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype=">u4").tobytes()


def lcp(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[list[int]], list[bytes | None], list[int], int, int]:
    """Forests of prompts: stems of several granules, short tails over few ids, repeats, some empty or tiny."""
    ids = st.sampled_from([0, 1, 255, 256, 65_536, 4_294_967_295])
    stems = draw(st.lists(st.lists(ids, max_size=40), min_size=1, max_size=4))
    size = draw(st.integers(0, 24))
    prompts = [draw(st.sampled_from(stems)) + draw(st.lists(ids, max_size=20)) for _ in range(size)]
    if prompts:
        prompts += draw(st.lists(st.sampled_from(prompts), max_size=12))
    keys = [draw(st.sampled_from([None, b"a", b"b"])) for _ in prompts]
    max_tokens = [draw(st.integers(1, 50)) for _ in prompts]
    return prompts, keys, max_tokens, draw(st.integers(1, 6)), draw(st.integers(1, 400))


def plan_of(window: tuple[list[list[int]], list[bytes | None], list[int], int, int]) -> WindowPlan:
    prompts, keys, max_tokens, unit_lines, unit_tokens = window
    packed = [pack(p) for p in prompts]
    return plan_window(packed, keys, max_tokens, unit_lines=unit_lines, unit_tokens=unit_tokens)


@given(windows())
def test_every_line_is_in_exactly_one_row_and_rows_fold_only_equal_requests(window) -> None:
    prompts, keys, *_ = window
    plan = plan_of(window)
    assert sorted(m for row in plan.rows for m in row.members) == list(range(len(prompts)))
    for row in plan.rows:
        assert list(row.members) == sorted(row.members)
        if len(row.members) > 1:
            assert keys[row.members[0]] is not None
            assert len({(tuple(prompts[m]), keys[m]) for m in row.members}) == 1


@given(windows())
def test_folding_is_complete_up_to_the_size_of_a_unit(window) -> None:
    prompts, keys, _, unit_lines, _ = window
    by_request: dict[tuple[tuple[int, ...], bytes | None], list[int]] = {}
    for row in plan_of(window).rows:
        by_request.setdefault((tuple(prompts[row.members[0]]), keys[row.members[0]]), []).append(len(row.members))
    for (_, key), sizes in by_request.items():
        if key is None:
            assert set(sizes) == {1}
        else:
            assert all(size == unit_lines for size in sizes[:-1])


@given(windows())
def test_planned_cached_tokens_are_the_longest_prefix_of_any_earlier_row_in_plan_order(window) -> None:
    prompts, keys, *_ = window
    seen: list[PlannedRow] = []
    for row in plan_of(window).rows:
        prompt, key = prompts[row.members[0]], keys[row.members[0]]
        twin = any(key is not None and (prompts[o.members[0]], keys[o.members[0]]) == (prompt, key) for o in seen)
        longest = max((lcp(prompt, prompts[o.members[0]]) for o in seen), default=0)
        expected = len(prompt) if twin else 16 * (min(longest, max(len(prompt) - 1, 0)) // 16)
        assert row.planned_cached_tokens == expected
        seen.append(row)


@given(windows())
def test_the_order_saves_as_much_as_the_prefix_tree_allows(window) -> None:
    """No order computes fewer distinct (depth, prefix) positions than the tree has; sorted groups reach that."""
    prompts, *_ = window
    plan = plan_of(window)
    order = [prompts[row.members[0]] for row in plan.rows]
    shared = sum(max((lcp(p, q) for q in order[:i]), default=0) for i, p in enumerate(order))
    distinct = {tuple(p[: n + 1]) for p in order for n in range(len(p))}
    assert sum(map(len, order)) - shared == len(distinct)


@given(windows())
def test_units_cover_the_rows_within_both_limits(window) -> None:
    prompts, _, max_tokens, unit_lines, unit_tokens = window
    plan = plan_of(window)
    assert [i for unit in plan.units for i in range(unit.start, unit.stop)] == list(range(len(plan.rows)))
    for unit in plan.units:
        rows = plan.rows[unit]
        assert rows
        assert sum(len(row.members) for row in rows) <= unit_lines
        tokens = sum(len(prompts[row.members[0]]) + max_tokens[row.members[0]] for row in rows)
        assert tokens <= unit_tokens or len(rows) == 1


@given(windows())
def test_prefix_uses_count_the_later_units_that_begin_with_the_prefix(window) -> None:
    prompts, *_ = window
    plan = plan_of(window)
    assert len(plan.prefix_uses) == len(plan.units)
    for number, (unit, uses) in enumerate(zip(plan.units, plan.prefix_uses, strict=True)):
        last = prompts[plan.rows[unit.stop - 1].members[0]]

        def later(depth: int, last: list[int] = last, number: int = number) -> int:
            rows = (plan.rows[u] for u in plan.units[number + 1 :])
            return sum(any(prompts[r.members[0]][:depth] == last[:depth] for r in unit_rows) for unit_rows in rows)

        counts = {depth: later(depth) for depth in range(16, len(last) + 1, 16)}
        # a depth is listed where the count changes; from there up to the next deeper one nothing changes
        expected = [(d, n) for d, n in counts.items() if n and n != counts.get(d + 16, 0)][::-1]
        assert [(use.depth_tokens, use.later_units) for use in uses] == expected
        for use in uses:
            digest = hashlib.blake2b(pack(last[: use.depth_tokens]), digest_size=16).hexdigest()
            assert use.digest_hex == digest


@given(windows())
def test_the_plan_is_a_function_of_its_input(window) -> None:
    assert plan_of(window) == plan_of(window)


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_common_prefix_equals_the_obvious_loop(a: list[int], b: list[int]) -> None:
    assert common_prefix_tokens(pack(a), pack(b)) == lcp(a, b)


def test_groups_with_long_answers_come_first() -> None:
    prompts = [[1] * 40 + [i] for i in range(3)] + [[2] * 40 + [i] for i in range(3)]
    plan = plan_window([pack(p) for p in prompts], [None] * 6, [4] * 3 + [400] * 3, unit_lines=9, unit_tokens=10**6)
    assert [row.members[0] for row in plan.rows] == [3, 4, 5, 0, 1, 2]
    assert [row.planned_cached_tokens for row in plan.rows] == [0, 32, 32, 0, 32, 32]


def test_units_are_cut_between_prefix_groups() -> None:
    prompts = [[g] * 32 + [i] for g in range(3) for i in range(6)]
    plan = plan_window([pack(p) for p in prompts], [None] * 18, [1] * 18, unit_lines=8, unit_tokens=10**6)
    assert [(unit.start, unit.stop) for unit in plan.units] == [(0, 6), (6, 12), (12, 18)]


def test_a_split_fold_group_prices_its_second_row_as_a_duplicate() -> None:
    plan = plan_window([pack([7] * 5)] * 7, [b"k"] * 7, [8] * 7, unit_lines=3, unit_tokens=10**6)
    assert [row.members for row in plan.rows] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert [row.planned_cached_tokens for row in plan.rows] == [0, 5, 5]


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="same length"):
        plan_window([b""], [], [1], unit_lines=1, unit_tokens=1)


def test_a_whole_window_is_planned_in_little_memory() -> None:
    """10,000 prompts of 200 tokens; what grows with the number of rows is well below a kilobyte each."""
    random = np.random.default_rng(0)
    stem = random.integers(0, 50_000, 100)
    tails = random.integers(0, 50_000, (10_000, 100))
    prompts = [np.concatenate([stem, tail]).astype(">u4").tobytes() for tail in tails]
    tracemalloc.start()
    plan = plan_window(prompts, [None] * len(prompts), [64] * len(prompts), unit_lines=512, unit_tokens=10**9)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 12_000_000
    assert sum(row.planned_cached_tokens == 96 for row in plan.rows) == 9_999
