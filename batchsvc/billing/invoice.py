"""The arithmetic and the states of invoices. Pure; billing/invoice_service.py stores and posts what comes out.

Prices are in US dollars, so the lines of an invoice are nano-dollars and their sum is the net amount, exactly. It is
converted once into nano-units of the invoice's currency; the tax is a share of that, rounded once; what is payable is
a whole number of minor units, and what that rounding moved is an amount of its own:

    net + tax + rounding = payable,  |rounding| <= half a minor unit
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from batchsvc.errors import InvalidRequestError
from batchsvc.money import NANOS_PER_DOLLAR, divide_half_even

PPM = 1_000_000
PRICE_CURRENCY = "USD"
_DECIMAL = re.compile(r"(\d{1,9})(?:\.(\d{1,9}))?", re.ASCII)


class InvoiceStatus(StrEnum):
    """`paid` and `void` are final."""

    DRAFT = "draft"
    ISSUED = "issued"
    DISPUTED = "disputed"
    PAID = "paid"
    VOID = "void"


MOVES = {
    InvoiceStatus.DRAFT: {InvoiceStatus.ISSUED},
    InvoiceStatus.ISSUED: {InvoiceStatus.PAID, InvoiceStatus.VOID, InvoiceStatus.DISPUTED},
    InvoiceStatus.DISPUTED: {InvoiceStatus.PAID, InvoiceStatus.VOID},
    InvoiceStatus.PAID: set(),
    InvoiceStatus.VOID: set(),
}


def check_move(name: str, now: InvoiceStatus, to: InvoiceStatus) -> None:
    """Raises InvalidRequestError (code `invalid_state`) if an invoice can't go from `now` to `to`."""
    if to in MOVES[now]:
        return
    possible = ", ".join(sorted(MOVES[now]))
    way = f"it can become {possible}" if possible else "that is final; a credit note corrects it"
    raise InvalidRequestError(f"The invoice {name} is {now} and can't become {to}: {way}.", code="invalid_state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What turns a net amount into a payable one. `exchange_rate_nanos`: nano-units of the currency per dollar."""

    currency: str
    exponent: int
    exchange_rate_nanos: int
    tax_rate_ppm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The amounts of an invoice: three in nano-units of its currency, and what is payable, in minor units."""

    net: int
    tax: int
    rounding: int
    payable_minor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """The same amounts as the ledger carries them, in nano-dollars; net + tax + rounding = payable."""

    tax_nanos: int
    rounding_nanos: int
    payable_nanos: int


def minor_unit(exponent: int) -> int:
    """Nano-units in a minor unit: 10,000,000 in a cent."""
    return int(10 ** (9 - exponent))


def totals(net_nanos: int, terms: Terms) -> Totals:
    """The amounts of an invoice over `net_nanos` dollars."""
    net = divide_half_even(net_nanos * terms.exchange_rate_nanos, NANOS_PER_DOLLAR)
    tax = divide_half_even(net * terms.tax_rate_ppm, PPM)
    minor = minor_unit(terms.exponent)
    payable_minor = divide_half_even(net + tax, minor)
    return Totals(net=net, tax=tax, rounding=payable_minor * minor - net - tax, payable_minor=payable_minor)


def part_of_gross(gross_minor: int, terms: Terms) -> tuple[int, Totals]:
    """The net in nano-dollars, and the amounts, of a gross amount that is given: what a credit note is made of."""
    gross = gross_minor * minor_unit(terms.exponent)
    tax = divide_half_even(gross * terms.tax_rate_ppm, PPM + terms.tax_rate_ppm)
    net = gross - tax
    net_nanos = divide_half_even(net * NANOS_PER_DOLLAR, terms.exchange_rate_nanos)
    return net_nanos, Totals(net=net, tax=tax, rounding=0, payable_minor=gross_minor)


def posted(net_nanos: int, amounts: Totals, terms: Terms) -> Posted:
    """The amounts in dollars, at the invoice's own rate; what conversion can't divide evenly counts as rounding."""
    payable = amounts.payable_minor * minor_unit(terms.exponent)
    payable_nanos = divide_half_even(payable * NANOS_PER_DOLLAR, terms.exchange_rate_nanos)
    tax_nanos = divide_half_even(amounts.tax * NANOS_PER_DOLLAR, terms.exchange_rate_nanos)
    rounding_nanos = payable_nanos - net_nanos - tax_nanos
    return Posted(tax_nanos=tax_nanos, rounding_nanos=rounding_nanos, payable_nanos=payable_nanos)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row of an invoice: tokens at a rate, or (without a rate) an amount alone.

    `reverses` names the invoice that it takes something back from, or the month, if that was never billed.
    """

    project_id: str
    kind: str
    amount_nanos: int
    model: str = ""
    tier: str = ""
    price_version: int = 0
    tokens: int = 0
    rate_nanos: int | None = None
    reverses: str | None = None
    batch_id: str | None = None


def parse_units(text: str, *, name: str, exponent: int = 9) -> int:
    """A decimal number as an integer of 10^-exponent. Raises InvalidRequestError, with `param`, for another form."""
    found = _DECIMAL.fullmatch(text.strip())
    fraction = (found[2] or "").rstrip("0") if found else ""
    if found is None or len(fraction) > exponent:
        digits = f"at most {exponent} digits after the point" if exponent else "no digits after a point"
        raise InvalidRequestError(f"{name} can't be {text!r}: it is a number with {digits}.", param=name)
    return int(found[1] + fraction.ljust(exponent, "0"))


def tax_rate_ppm(percent: str) -> int:
    """`19` or `8.875` percent in millionths. Raises InvalidRequestError for less than 0 or more than 100."""
    ppm = parse_units(percent, name="tax_rate", exponent=4)
    if ppm > PPM:
        raise InvalidRequestError(f"tax_rate can't be {percent!r}: it is a percentage.", param="tax_rate")
    return ppm


def format_units(units: int, *, digits: int = 2, exponent: int = 9) -> str:
    """`1.234567` of an integer of 10^-exponent: every digit that counts, and at least `digits`."""
    whole, rest = divmod(abs(units), 10**exponent)
    fraction = f"{rest:0{exponent}d}".rstrip("0").ljust(digits, "0") if exponent else ""
    return f"{'-' if units < 0 else ''}{whole:,}" + (f".{fraction}" if fraction else "")
