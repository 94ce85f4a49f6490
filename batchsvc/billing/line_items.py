"""Takes a sum of costs apart by kind of token, so that the items add up to it exactly: pure, no database.

A line's cost is rounded once, over its three kinds of tokens together, so no kind has an exact share of it. Each item
is tokens times rate, rounded; what rounding the lines had added or taken is an item of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsvc.money import TOKENS_PER_RATE, Rates, divide_half_even

INPUT, CACHED_INPUT, OUTPUT, ROUNDING = "input_tokens", "cached_input_tokens", "output_tokens", "rounding"
CORRECTIONS = {"refund": "refund", "credit": "goodwill", "credit_note": "credit note"}  # items by kind of posting


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Sums over lines. `input_tokens` includes `cached_tokens`; what takes usage back is negative."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_nanos: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cost_nanos=self.cost_nanos + other.cost_nanos,
        )


@dataclass(frozen=True, slots=True)
class Item:
    """What one kind of token cost. `tokens` and `rate_nanos` (per million) are None for the rounding."""

    name: str
    kind: str
    tokens: int | None
    rate_nanos: int | None
    amount_nanos: int


def items(model: str, tier: str, rates: Rates | None, usage: Usage) -> list[Item]:
    """The items of a sum over lines of one price row; those without tokens, and a rounding of 0, are left out.

    Without rates, as of a price book that is gone, the whole sum is one item.
    """
    if rates is None:
        return [Item(f"{model}, {tier}", "", None, None, usage.cost_nanos)]
    found = [
        Item(f"{model}, {tier}, {kind}", kind, tokens, rate, divide_half_even(tokens * rate, TOKENS_PER_RATE))
        for kind, tokens, rate in (
            (INPUT, usage.input_tokens - usage.cached_tokens, rates.input),
            (CACHED_INPUT, usage.cached_tokens, rates.cached_input),
            (OUTPUT, usage.output_tokens, rates.output),
        )
        if tokens
    ]
    rest = usage.cost_nanos - sum(item.amount_nanos for item in found)
    if rest:
        found.append(Item(f"{model}, {tier}, {ROUNDING}", ROUNDING, None, None, rest))
    return found
