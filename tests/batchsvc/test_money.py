"""Money is exact: one rounding, half to even, and sums of lines are sums of integers."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.money import Rates, divide_half_even, format_dollars, line_cost_nanos, parse_dollars

tokens = st.integers(0, 10**9)
rate = st.integers(0, 10**12)


@given(st.integers(-(10**30), 10**30), st.integers(1, 10**12))
def test_division_rounds_half_to_even(numerator: int, denominator: int) -> None:
    assert divide_half_even(numerator, denominator) == round(Fraction(numerator, denominator))


@given(rate, rate, rate, tokens, tokens, tokens)
def test_a_line_is_the_exact_value_rounded_once(i: int, c: int, o: int, uncached: int, cached: int, out: int) -> None:
    cost = line_cost_nanos(
        Rates(input=i, cached_input=c, output=o),
        input_tokens=uncached + cached,
        cached_tokens=cached,
        output_tokens=out,
    )
    exact = (Decimal(uncached) * i + Decimal(cached) * c + Decimal(out) * o) / 1_000_000
    assert cost == int(exact.quantize(Decimal(1), ROUND_HALF_EVEN))


@given(tokens, tokens, tokens)
def test_more_cached_tokens_never_cost_more(prompt: int, cached: int, out: int) -> None:
    rates = Rates(input=20_000_000, cached_input=5_000_000, output=80_000_000)
    cached = min(cached, prompt)
    some = line_cost_nanos(rates, input_tokens=prompt, cached_tokens=cached, output_tokens=out)
    assert some <= line_cost_nanos(rates, input_tokens=prompt, cached_tokens=0, output_tokens=out)


def test_a_worked_example() -> None:
    # 600 prompt tokens, 512 of them cached, 100 out, at half of the standard price:
    # 88 * 10 + 512 * 2.5 + 100 * 40 nano-dollars
    rates = Rates(input=10_000_000, cached_input=2_500_000, output=40_000_000)
    assert line_cost_nanos(rates, input_tokens=600, cached_tokens=512, output_tokens=100) == 6160


def test_impossible_usage_and_negative_prices_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Rates(input=-1, cached_input=0, output=0)
    rates = Rates(input=1, cached_input=1, output=1)
    with pytest.raises(ValueError, match="Impossible usage"):
        line_cost_nanos(rates, input_tokens=1, cached_tokens=2, output_tokens=0)


def test_dollars_show_every_digit_that_counts() -> None:
    assert format_dollars(0) == "$0.00"
    assert format_dollars(1) == "$0.000000001"
    assert format_dollars(-1_500_000_000) == "-$1.50"
    assert format_dollars(12_345_678_900) == "$12.3456789"


@given(
    st.text(max_size=40)
    | st.sampled_from(["1e999999", "-1e999999", "1e-999999", "NaN", "sNaN", "Infinity", "0x1", "1_0"])
)
def test_whatever_is_sent_as_dollars_is_an_amount_or_none(value: str) -> None:
    nanos = parse_dollars(value)
    assert nanos is None or Decimal(value) * 10**9 == nanos
