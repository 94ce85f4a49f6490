"""The arithmetic of a quote: what planned lines cost, with answers of which only the greatest length is certain. Pure.

A line's cost is rounded once, over input and output together. So the share of the input is what the line would cost
without an answer, and the share of the output is the rest: the two add up to the line, and those of lines to the bill.
Both only fall when more of the prompt turns out to be cached, which makes what is quoted for input the most that is
billed for it.

How long answers get is told from what finished lines of the same project, model and endpoint showed, else from
`max_tokens`. Lengths are thousandths of a token, because a mean is rarely whole, and sums of thousandths are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from batchsvc.batches.unit_file import UnitRow
from batchsvc.billing.pricing import most_nanos
from batchsvc.money import TOKENS_PER_RATE, Rates, divide_half_even

_LEAST_LINES = 20  # finished lines that are enough to go by
_LOW_PERCENT, _HIGH_PERCENT = 10, 90
_MILLI = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Thousandths of output tokens that an answer of `lines` finished lines had: the mean, and between which means most
    lie."""

    lines: int
    low: int
    expected: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Sums over planned lines. `most_nanos` is all of it if every answer is as long as it may be; the output lengths
    are in thousandths of tokens."""

    lines: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    input_nanos: int = 0
    most_nanos: int = 0
    low_output: int = 0
    expected_output: int = 0
    high_output: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def output_nanos(self, length: int, rates: Rates) -> int:
        """Cost of answers that are so many thousandths of tokens long in all; never more than there is room for."""
        cost = divide_half_even(length * rates.output, _MILLI * TOKENS_PER_RATE)
        return min(cost, self.most_nanos - self.input_nanos)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where a number probably lies."""

    low: int
    expected: int
    high: int


_NAMES = tuple(field.name for field in fields(Figures))


def lengths_of(finished: Sequence[tuple[int, int]]) -> Lengths | None:
    """What pieces of finished work showed, each given as lines and what they would have had of output tokens with one
    answer a line. None: too little to go by."""
    pieces = sorted(((lines, tokens) for lines, tokens in finished if lines > 0), key=lambda piece: piece[1] / piece[0])
    lines = sum(piece[0] for piece in pieces)
    if lines < _LEAST_LINES:
        return None
    expected = _MILLI * sum(piece[1] for piece in pieces) // lines
    low, high = (_percentile(pieces, lines, percent) for percent in (_LOW_PERCENT, _HIGH_PERCENT))
    return Lengths(lines=lines, low=min(low, expected), expected=expected, high=max(high, expected))


def figures(rows: Iterable[UnitRow], rates: Rates, lengths: Lengths | None) -> Figures:
    """Sums over all lines of these rows."""
    sums = dict.fromkeys(_NAMES, 0)
    for row in rows:
        count, answers = len(row.line_nos), _MILLI * row.num_answers
        least, most = answers * row.params.get("min_tokens", 0), _MILLI * row.most_output_tokens
        low, expected, high = least, _MILLI * row.est_output_tokens, most
        if row.is_sure:
            low = most
        elif lengths is not None:
            low, expected, high = (
                min(max(row.num_answers * guess, least), most)
                for guess in (lengths.low, lengths.expected, lengths.high)
            )
        sums["lines"] += count
        sums["low_output"] += count * low
        sums["expected_output"] += count * expected
        sums["high_output"] += count * high
        for member in range(count):
            tokens, cached = len(row.prompt_ids), row.cached_tokens(member)
            sums["input_tokens"] += tokens
            sums["cached_tokens"] += cached
            for name, output in (("input_nanos", 0), ("most_nanos", row.most_output_tokens)):
                sums[name] += most_nanos(rates, input_tokens=tokens, planned_cached_tokens=cached, max_tokens=output)
    return Figures(**sums)


def shown_costs(found: Figures, rates: Rates) -> dict[str, Any]:
    """The costs as the API shows them, all in nano-dollars."""
    output = {
        name: found.output_nanos(length, rates)
        for name, length in (
            ("low", found.low_output),
            ("expected", found.expected_output),
            ("high", found.high_output),
        )
    }
    return {
        "input_nanos": found.input_nanos,
        "output_nanos": output,
        "total_nanos": {name: found.input_nanos + nanos for name, nanos in output.items()},
        "most_nanos": found.most_nanos,
    }


def sum_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Shown costs added up, name by name."""
    return {
        name: sum_of(value, other[name]) if isinstance(value, dict) else value + other[name]
        for name, value in one.items()
    }


def estimated_costs(
    tokens: Interval, uncached: Interval, *, sample: Figures, lines: int, rates: Rates
) -> dict[str, dict[str, int]]:
    """The costs of an estimate of so many lines, as intervals; answers are as long as those of the sample."""
    inputs, outputs = {}, {}
    for name in ("low", "expected", "high"):
        all_tokens, new_tokens = getattr(tokens, name), getattr(uncached, name)
        old_tokens = max(0, all_tokens - new_tokens)
        inputs[name] = divide_half_even(new_tokens * rates.input + old_tokens * rates.cached_input, TOKENS_PER_RATE)
        length = getattr(sample, f"{name}_output") * lines
        outputs[name] = divide_half_even(length * rates.output, _MILLI * TOKENS_PER_RATE * max(1, sample.lines))
    totals = {name: inputs[name] + outputs[name] for name in inputs}
    return {"input_nanos": inputs, "output_nanos": outputs, "total_nanos": totals}


def from_json(values: Mapping[str, int] | None) -> Figures:
    """Figures that were stored by `asdict`; none at all as zeros."""
    return Figures(**(values or {}))


def _percentile(pieces: Sequence[tuple[int, int]], lines: int, percent: int) -> int:
    """The mean length of the piece in which this percentage of all lines is reached; pieces are in order of means."""
    reached = 0
    for count, tokens in pieces:
        reached += count
        if 100 * reached >= percent * lines:
            return _MILLI * tokens // count
    raise AssertionError("unreachable: all lines are 100 percent of them")
