"""Nano-dollars and the one rounding rule.

Money is an integer of nano-dollars (1e-9 dollars). Rates are integer nano-dollars per million tokens, because half
of a price per token need not be an integer. A line is rounded once, half to even; every sum is a sum of such lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, DecimalException

NANOS_PER_DOLLAR = 1_000_000_000
TOKENS_PER_RATE = 1_000_000
_MOST_CHARS = 40  # of an amount as text
MOST_NANOS = 10**18  # a billion dollars: sums of such amounts still fit 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Nano-dollars per million tokens. All three are at least 0."""

    input: int
    cached_input: int
    output: int

    def __post_init__(self) -> None:
        if min(self.input, self.cached_input, self.output) < 0:
            raise ValueError(f"Prices must not be negative: {self}.")


def divide_half_even(numerator: int, denominator: int) -> int:
    """`numerator / denominator` rounded half to even, exactly, for integers with denominator > 0."""
    quotient, remainder = divmod(numerator, denominator)
    twice = 2 * remainder
    if twice > denominator or (twice == denominator and quotient % 2 == 1):
        quotient += 1
    return quotient


def line_cost_nanos(rates: Rates, *, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Cost of one delivered line. `input_tokens` includes `cached_tokens` (OpenAI's convention)."""
    if not 0 <= cached_tokens <= input_tokens or output_tokens < 0:
        raise ValueError(f"Impossible usage: {input_tokens=} {cached_tokens=} {output_tokens=}.")
    weighted = (
        (input_tokens - cached_tokens) * rates.input + cached_tokens * rates.cached_input + output_tokens * rates.output
    )
    return divide_half_even(weighted, TOKENS_PER_RATE)


def parse_dollars(value: object) -> int | None:
    """Nano-dollars of an amount such as "12.50", 3 or 0.1; None if it isn't one, or finer than a nano-dollar.

    A JSON number is meant as its shortest decimal text says, and that is what it counts for.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    text = value if isinstance(value, str) else repr(value)
    try:
        nanos = Decimal(text) * NANOS_PER_DOLLAR if text.isascii() and len(text) <= _MOST_CHARS else None
    except DecimalException:  # no number, or one beyond all bounds
        return None
    if nanos is None or not nanos.is_finite() or nanos != nanos.to_integral_value() or abs(nanos) > MOST_NANOS:
        return None
    return int(nanos)


def format_dollars(nanos: int) -> str:
    """`$0.001234567`: every digit that counts, no float on the way."""
    sign = "-" if nanos < 0 else ""
    dollars, rest = divmod(abs(nanos), NANOS_PER_DOLLAR)
    digits = f"{rest:09d}".rstrip("0")
    return f"{sign}${dollars}.{digits.ljust(2, '0')}"
