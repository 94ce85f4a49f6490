"""An invoice as texts in their places, before it becomes HTML or PDF: what it says, not how it looks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from batchsvc.billing.invoice import PRICE_CURRENCY, InvoiceStatus, format_units, minor_unit
from batchsvc.billing.invoice_tables import Invoice, InvoiceLine
from batchsvc.billing.month import Month, day_of

COLUMNS = ("Model", "Tier", "Item", "Tokens", "USD per million", "Amount in USD")
ITEMS = {
    "input_tokens": "input tokens",
    "cached_input_tokens": "cached input tokens",
    "output_tokens": "output tokens",
    "rounding": "rounding of requests to 0.000000001",
    "refund": "refund",
    "goodwill": "goodwill credit",
    "credit": "credit, without tax",
}


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one project and their sum."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    subtotal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Everything that an invoice says."""

    title: str
    facts: tuple[tuple[str, str], ...]
    seller: tuple[str, ...]
    buyer: tuple[str, ...]
    sections: tuple[Section, ...]
    totals: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    issued_ms: int | None

    def texts(self) -> str:
        """All of it in one string: what a font needs glyphs for."""
        rows = [cell for section in self.sections for row in section.rows for cell in row]
        pairs = [text for pair in (*self.facts, *self.totals) for text in pair]
        subtotals = [text for section in self.sections for text in (section.title, section.subtotal)]
        return " ".join((self.title, *self.seller, *self.buyer, *self.notes, *pairs, *rows, *subtotals, *COLUMNS))


def document(row: Invoice, lines: Sequence[InvoiceLine]) -> Document:
    """What the invoice, draft or credit note says."""
    name = "Credit note" if row.kind == "credit_note" else "Invoice"
    is_draft = row.status == InvoiceStatus.DRAFT
    month = Month.parse(row.month)
    facts = [
        ("Number", row.number or "none, this is a draft"),
        ("Date of issue", "not issued" if row.issued_ms is None else str(day_of(row.issued_ms))),
        ("Date of supply", f"{month.first_day} to {month.last_day} (UTC)"),
    ]
    if row.corrects:
        facts.append(("Corrects invoice", row.corrects))
    notes = [text for text in (row.tax_note, row.reason) if text]
    return Document(
        title=f"Draft of {'a credit note' if row.kind == 'credit_note' else 'an invoice'}" if is_draft else name,
        facts=tuple(facts),
        seller=_party(row.seller),
        buyer=_party(row.buyer),
        sections=tuple(_sections(row, lines)),
        totals=tuple(_totals(row)),
        notes=tuple(notes),
        issued_ms=row.issued_ms,
    )


def _party(party: Mapping[str, Any]) -> tuple[str, ...]:
    address = [text.strip() for text in str(party["address"]).replace(";", "\n").split("\n")]
    tax_id = f"Tax id {party['tax_id']}" if party["tax_id"] else ""
    return tuple(text for text in (str(party["name"]), *address, str(party["country"]), tax_id) if text)


def _sections(row: Invoice, lines: Sequence[InvoiceLine]) -> list[Section]:
    names = {project["id"]: project["name"] for project in row.projects}
    found = []
    for project_id, group in groupby(lines, key=lambda line: line.project_id):
        rows = list(group)
        total = sum(line.amount_nanos for line in rows)
        title = f"Project {names.get(project_id, '')} ({project_id})"
        found.append(Section(title, tuple(map(_row, rows)), format_units(total)))
    return found


def _row(line: InvoiceLine) -> tuple[str, ...]:
    item = ITEMS.get(line.kind, line.kind)
    if line.batch_id:
        item += f" for {line.batch_id}"
    if line.reverses:
        item += f", corrects {line.reverses}"
    return (
        line.model,
        line.tier,
        item,
        f"{line.tokens:,}" if line.tokens else "",
        "" if line.rate_nanos is None else format_units(line.rate_nanos),
        format_units(line.amount_nanos),
    )


def _totals(row: Invoice) -> list[tuple[str, str]]:
    def amount(units: int) -> str:
        return format_units(units, digits=row.exponent)

    found = [(f"Net in {PRICE_CURRENCY}", format_units(row.net_nanos))]
    if row.currency != PRICE_CURRENCY:
        rate = format_units(row.exchange_rate_nanos)
        found.append(("Exchange rate", f"1 {PRICE_CURRENCY} = {rate} {row.currency}"))
        found.append((f"Net in {row.currency}", amount(row.net)))
    percent = format_units(row.tax_rate_ppm, digits=0, exponent=4)
    found.append((f"Tax {percent} %", amount(row.tax)))
    found.append(("Gross", amount(row.net + row.tax)))
    found.append((f"Rounding to {amount(minor_unit(row.exponent))}", amount(row.rounding)))
    payable = format_units(row.payable_minor, digits=row.exponent, exponent=row.exponent)
    found.append(("Payable", f"{payable} {row.currency}"))
    return found
