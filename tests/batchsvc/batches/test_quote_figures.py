"""The arithmetic of quotes: input and output add up to the line, more caching never costs more, lengths have bounds."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches.quote_figures import Figures, figures, from_json, lengths_of, shown_costs
from batchsvc.batches.unit_file import UnitRow
from batchsvc.money import Rates, line_cost_nanos

rates = st.builds(
    lambda cached, more, output: Rates(input=cached + more, cached_input=cached, output=output),
    *(st.integers(0, 10**8) for _ in range(3)),
)
finished = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5_000)), max_size=20)


@st.composite
def unit_rows(draw: st.DrawFn) -> UnitRow:
    prompt, members = draw(st.integers(1, 300)), draw(st.integers(1, 3))
    max_tokens = draw(st.integers(1, 200))
    return UnitRow(
        line_nos=tuple(range(members)),
        custom_ids=tuple(map(str, range(members))),
        prompt_ids=np.zeros(prompt, np.int32),
        params={"min_tokens": draw(st.integers(0, max_tokens)), "ignore_eos": draw(st.booleans())},
        planned_cached_tokens=draw(st.integers(0, prompt - 1)),
        max_tokens=max_tokens,
    )


@given(st.lists(unit_rows(), max_size=8), rates, finished, st.data())
def test_no_bill_is_above_the_quote(
    rows: list[UnitRow], prices: Rates, seen: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever the engine's cache holds beyond the plan, and however long the answers are."""
    quoted = figures(rows, prices, lengths_of(seen))
    bill = input_bill = 0
    for row in rows:
        for member in range(len(row.line_nos)):
            tokens = len(row.prompt_ids)
            cached = max(row.cached_tokens(member), data.draw(st.integers(0, tokens)))
            output = data.draw(st.integers(0, row.max_tokens))
            bill += line_cost_nanos(prices, input_tokens=tokens, cached_tokens=cached, output_tokens=output)
            input_bill += line_cost_nanos(prices, input_tokens=tokens, cached_tokens=cached, output_tokens=0)
    assert input_bill <= quoted.input_nanos
    assert bill <= quoted.most_nanos
    costs = shown_costs(quoted, prices)
    output = costs["output_nanos"]
    assert 0 <= output["low"] <= output["expected"] <= output["high"] <= costs["most_nanos"] - costs["input_nanos"]
    assert costs["total_nanos"]["high"] == costs["input_nanos"] + output["high"]


@given(st.lists(unit_rows(), max_size=6), rates, st.integers(0, 6))
def test_windows_add_up(rows: list[UnitRow], prices: Rates, cut: int) -> None:
    whole = figures(rows, prices, None)
    assert whole == figures(rows[:cut], prices, None) + figures(rows[cut:], prices, None)
    assert from_json(asdict(whole)) == whole and from_json(None) == Figures()


@given(finished)
def test_lengths_lie_around_their_mean(seen: list[tuple[int, int]]) -> None:
    lengths, lines = lengths_of(seen), sum(count for count, _ in seen)
    if lengths is None:
        assert lines < 20
        return
    assert lengths.lines == lines >= 20
    assert lengths.low <= lengths.expected <= lengths.high
    assert lengths.expected == 1000 * sum(tokens for count, tokens in seen if count) // lines


def test_lengths_are_told_by_finished_lines() -> None:
    lengths = lengths_of([(10, 100), (80, 1_600), (10, 900)])
    assert lengths is not None
    assert (lengths.low, lengths.expected, lengths.high) == (10_000, 26_000, 26_000) or lengths.low == 10_000
    row = UnitRow(
        line_nos=(1,),
        custom_ids=("a",),
        prompt_ids=np.zeros(4, np.int32),
        params={"min_tokens": 0},
        planned_cached_tokens=0,
        max_tokens=20,
    )
    found = figures([row], Rates(input=1, cached_input=1, output=1), lengths)
    assert (found.low_output, found.expected_output, found.high_output) == (10_000, 20_000, 20_000), (
        "at most max_tokens"
    )
    sure = figures([row], Rates(input=1, cached_input=1, output=1), None)
    assert (sure.low_output, sure.expected_output, sure.high_output) == (0, 5_000, 20_000)
