"""The arithmetic of invoices: amounts that add up, one rounding that hides nothing, states, months, currencies."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.billing import invoice
from batchsvc.billing.currency import exponent_of
from batchsvc.billing.invoice import MOVES, InvoiceStatus, Terms
from batchsvc.billing.month import Month, day_of, iso_time
from batchsvc.errors import InvalidRequestError

NANOS = st.integers(-(10**15), 10**15)
TERMS = st.builds(
    Terms,
    currency=st.just("XYZ"),
    exponent=st.sampled_from([0, 2, 3, 4]),
    exchange_rate_nanos=st.one_of(st.just(10**9), st.integers(10**6, 10**12)),
    tax_rate_ppm=st.integers(0, 10**6),
)
DAY_MS = 86_400_000


@given(NANOS, TERMS)
def test_amounts_add_up_and_rounding_is_half_a_minor_unit_at_most(net_nanos: int, terms: Terms) -> None:
    found = invoice.totals(net_nanos, terms)
    minor = 10**9 // 10**terms.exponent
    assert found.net + found.tax + found.rounding == found.payable_minor * minor
    assert 2 * abs(found.rounding) <= minor
    # net and tax are rounded once each, to a nano-unit
    assert abs(found.net * 10**9 - net_nanos * terms.exchange_rate_nanos) * 2 <= 10**9
    assert abs(found.tax * 10**6 - found.net * terms.tax_rate_ppm) * 2 <= 10**6
    booked = invoice.posted(net_nanos, found, terms)
    assert net_nanos + booked.tax_nanos + booked.rounding_nanos == booked.payable_nanos
    if terms.exchange_rate_nanos == 10**9:
        assert (booked.tax_nanos, booked.rounding_nanos) == (found.tax, found.rounding)


@given(st.integers(1, 10**9), TERMS)
def test_a_gross_amount_is_taken_apart_without_a_rest(gross_minor: int, terms: Terms) -> None:
    net_nanos, found = invoice.part_of_gross(-gross_minor, terms)
    assert (
        found.net + found.tax
        == found.payable_minor * (10**9 // 10**terms.exponent)
        == -gross_minor * (10**9 // 10**terms.exponent)
    )
    assert found.rounding == 0 and found.net <= 0 and found.tax <= 0
    assert abs(found.tax * 10**6 - found.net * terms.tax_rate_ppm) <= 10**6 + terms.tax_rate_ppm
    booked = invoice.posted(net_nanos, found, terms)
    assert net_nanos + booked.tax_nanos + booked.rounding_nanos == booked.payable_nanos


def test_an_example_as_it_stands_on_paper() -> None:
    terms = Terms(currency="EUR", exponent=2, exchange_rate_nanos=920_000_000, tax_rate_ppm=190_000)
    found = invoice.totals(12_345_678_901, terms)
    assert (found.net, found.tax, found.payable_minor) == (11_358_024_589, 2_158_024_672, 1352)
    assert found.rounding == 3_950_739
    assert invoice.format_units(found.net) == "11.358024589"


def test_states_move_as_the_table_says_and_in_no_other_way() -> None:
    for now, to in product(InvoiceStatus, InvoiceStatus):
        if to in MOVES[now]:
            invoice.check_move("INV-000001", now, to)
        else:
            with pytest.raises(InvalidRequestError, match=f"is {now} and can't become {to}"):
                invoice.check_move("INV-000001", now, to)
    assert MOVES[InvoiceStatus.PAID] == MOVES[InvoiceStatus.VOID] == set()
    assert not any(InvoiceStatus.DRAFT in to for to in MOVES.values())


@given(st.integers(0, 7_258_118_400_000))
def test_a_moment_belongs_to_its_month_alone(ms: int) -> None:
    moment = datetime.fromtimestamp(ms / 1000, UTC)
    month = Month.of(ms)
    assert (month.year, month.month) == (moment.year, moment.month)
    assert month.start_ms <= ms < month.end_ms == month.next.start_ms
    assert Month.of(month.end_ms - 1) == month and Month.of(month.end_ms) == month.next
    assert Month.parse(str(month)) == month and day_of(ms) == moment.date()


@pytest.mark.parametrize(
    ("month", "days", "last"),
    [("2026-01", 31, "31"), ("2024-02", 29, "29"), ("2023-02", 28, "28"), ("2100-02", 28, "28")],
)
def test_months_end_where_the_calendar_says(month: str, days: int, last: str) -> None:
    found = Month.parse(month)
    assert found.end_ms - found.start_ms == days * DAY_MS
    assert str(found.last_day) == f"{month}-{last}"
    assert iso_time(found.end_ms - 1) == f"{month}-{last}T23:59:59.999Z"


@pytest.mark.parametrize("wrong", ["2026-13", "2026-1", "26-01", "2026-00", "", "2026-01-01", "٢٠٢٦-٠١", "1969-12"])
def test_what_is_no_month_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Month.parse(wrong)
    assert refused.value.param == "month"


def test_currencies_are_those_of_iso_4217() -> None:
    assert [exponent_of(code) for code in ("USD", "EUR", "JPY", "KWD")] == [2, 2, 0, 3]
    for wrong in ("XXX", "XAU", "EURO", "usd", "", "ZZZ", "BTC"):
        with pytest.raises(InvalidRequestError) as refused:
            exponent_of(wrong)
        assert refused.value.code == "invalid_currency"


@given(st.integers(0, 10**17), st.sampled_from([0, 2, 3, 9]))
def test_amounts_are_read_as_they_are_written(units: int, exponent: int) -> None:
    text = invoice.format_units(units, digits=exponent, exponent=exponent).replace(",", "")
    if units < 10 ** (9 + exponent):
        assert invoice.parse_units(text, name="amount", exponent=exponent) == units


@pytest.mark.parametrize("wrong", ["-1", "1e3", "1,5", "0.001", "", "nan", " ", "1.", "٣"])
def test_what_is_no_amount_of_cents_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match="amount can't be"):
        invoice.parse_units(wrong, name="amount", exponent=2)
