"""Wire shapes of invoices, the parties on them, and statements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from batchsvc.accounts.tables import Project
from batchsvc.billing.invoice import format_units
from batchsvc.billing.invoice_tables import BillingParty, Invoice, InvoiceLine
from batchsvc.billing.statement import Statement

_ONE_LINE = r"^[^\x00-\x1f]*$"
_LINES = r"^[^\x00-\x09\x0b-\x1f]*$"
_COUNTRY = r"^([A-Z]{2})?$"


class ChangeParty(BaseModel):
    """To whom a project is billed; what isn't named stays. `tax_rate` is in percent, null means the seller's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(default="", max_length=255, pattern=_ONE_LINE)
    address: str = Field(default="", max_length=1000, pattern=_LINES)
    country: str = Field(default="", pattern=_COUNTRY)
    tax_id: str = Field(default="", max_length=64, pattern=_ONE_LINE)
    currency: str = Field(default="USD", max_length=3)
    tax_rate: str | None = None
    is_reverse_charge: bool = False
    bill_to: str | None = None


class DraftInvoice(BaseModel):
    """Which month of which project; `exchange_rate` is the currency's worth of a dollar, such as 0.92."""

    model_config = ConfigDict(extra="forbid", strict=True)

    project: str
    month: str
    exchange_rate: str | None = None


class Change(BaseModel):
    """Why an invoice changes its state, or is credited; `amount` in its currency, tax included, or null for all."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str | None = Field(default=None, min_length=1, max_length=255, pattern=_ONE_LINE)
    amount: str | None = None
    key: str | None = Field(default=None, min_length=1, max_length=160, pattern=_ONE_LINE)


def party_object(project: Project, row: BillingParty) -> dict[str, Any]:
    """To whom a project is billed."""
    return {
        "object": "billing_party",
        "project_id": project.id,
        "project": project.name,
        "name": row.name,
        "address": row.address,
        "country": row.country,
        "tax_id": row.tax_id,
        "currency": row.currency,
        "tax_rate": None if row.tax_rate_ppm is None else format_units(row.tax_rate_ppm, digits=0, exponent=4),
        "is_reverse_charge": row.is_reverse_charge,
        "bill_to": row.bill_to,
    }


def invoice_object(row: Invoice, lines: Sequence[InvoiceLine] | None = None) -> dict[str, Any]:
    """An invoice; with its lines where one is asked for. Amounts of money are also given as integers."""
    shown: dict[str, Any] = {
        "id": row.id,
        "object": row.kind,
        "number": row.number,
        "status": row.status,
        "status_at": row.status_ms // 1000,
        "status_reason": row.status_reason,
        "created_at": row.created_ms // 1000,
        "issued_at": None if row.issued_ms is None else row.issued_ms // 1000,
        "project_id": row.project_id,
        "projects": row.projects,
        "month": row.month,
        "seller": row.seller,
        "buyer": row.buyer,
        "currency": row.currency,
        "exchange_rate": format_units(row.exchange_rate_nanos),
        "tax_rate": format_units(row.tax_rate_ppm, digits=0, exponent=4),
        "tax_note": row.tax_note or None,
        "net_nanos": row.net_nanos,
        "tax_nanos": row.tax_nanos,
        "rounding_nanos": row.rounding_nanos,
        "payable_nanos": row.payable_nanos,
        "net": format_units(row.net, digits=row.exponent),
        "tax": format_units(row.tax, digits=row.exponent),
        "rounding": format_units(row.rounding, digits=row.exponent),
        "payable": format_units(row.payable_minor, digits=row.exponent, exponent=row.exponent),
        "payable_minor": row.payable_minor,
        "corrects": row.corrects,
        "reason": row.reason,
    }
    if lines is not None:
        shown["lines"] = [line_object(line) for line in lines]
    return shown


def line_object(line: InvoiceLine) -> dict[str, Any]:
    """A row of an invoice."""
    return {
        "project_id": line.project_id,
        "model": line.model,
        "tier": line.tier,
        "kind": line.kind,
        "price_version": line.price_version,
        "tokens": line.tokens,
        "nanos_per_million": line.rate_nanos,
        "amount_nanos": line.amount_nanos,
        "corrects": line.reverses,
        "batch_id": line.batch_id,
    }


def statement_object(found: Statement) -> dict[str, Any]:
    """A statement."""
    return {
        "object": "statement",
        "project_id": found.project_id,
        "project": found.project_name,
        "month": str(found.month),
        "opening_nanos": found.opening_nanos,
        "movements": [
            {
                "kind": row.kind,
                "batch_id": row.batch_id,
                "key": row.key,
                "reason": row.reason,
                "last_at": row.last_ms // 1000,
                "postings": row.postings,
                "amount_nanos": row.amount_nanos,
            }
            for row in found.movements
        ],
        "closing_nanos": found.closing_nanos,
    }
