"""Tables of invoices. An issued one never changes: triggers of revision 0003 see to it on both databases."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Digits, Id, Json, Millis


class BillingParty(Base):
    """To whom a project's usage is billed, and on which terms. With `bill_to`, on that project's invoice."""

    __tablename__ = "billing_parties"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(255), default="")
    address: Mapped[str] = mapped_column(Text, default="")
    country: Mapped[str] = mapped_column(String(2), default="")
    tax_id: Mapped[str] = mapped_column(String(64), default="")
    currency: Mapped[str] = mapped_column(String(3), default="USD")
    tax_rate_ppm: Mapped[int | None] = mapped_column(Integer)  # null: the seller's
    is_reverse_charge: Mapped[bool] = mapped_column(Boolean, default=False)
    bill_to: Mapped[str | None] = mapped_column(ForeignKey("projects.id"), index=True)


class InvoiceSeries(Base):
    """The last number of a series. It is taken in the transaction that issues, so a rollback leaves no gap."""

    __tablename__ = "invoice_series"

    series: Mapped[str] = mapped_column(String(24), primary_key=True)
    last: Mapped[int] = mapped_column(BigInt, default=0)


class Invoice(Base):
    """A draft, an invoice or a credit note (its amounts are negative). Amounts in `_nanos` are dollars; `net`, `tax`
    and `rounding` are nano-units of `currency`, of which a large bill has too many for 64 bits."""

    __tablename__ = "invoices"
    __table_args__ = (
        UniqueConstraint("series", "no"),
        Index("ix_invoices_project", "project_id", "month"),
    )

    id: Mapped[Id]
    kind: Mapped[str] = mapped_column(String(16))  # invoice, credit_note
    series: Mapped[str | None] = mapped_column(String(24))  # null, like the number, while it is a draft
    no: Mapped[int | None] = mapped_column(BigInt)
    number: Mapped[str | None] = mapped_column(String(40), unique=True)
    status: Mapped[str] = mapped_column(String(16))
    status_ms: Mapped[Millis]
    status_reason: Mapped[str | None] = mapped_column(String(255))
    created_ms: Mapped[Millis]
    issued_ms: Mapped[int | None] = mapped_column(BigInt)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))  # who pays
    projects: Mapped[list[Any]] = mapped_column(Json)  # [{"id": ..., "name": ...}] of those whose usage it bills
    month: Mapped[str] = mapped_column(String(7))  # of supply
    seller: Mapped[dict[str, Any]] = mapped_column(Json)
    buyer: Mapped[dict[str, Any]] = mapped_column(Json)
    currency: Mapped[str] = mapped_column(String(3))
    exponent: Mapped[int] = mapped_column(Integer)
    exchange_rate_nanos: Mapped[int] = mapped_column(BigInt)  # nano-units of the currency per dollar
    tax_rate_ppm: Mapped[int] = mapped_column(Integer)
    tax_note: Mapped[str] = mapped_column(String(255), default="")
    net_nanos: Mapped[int] = mapped_column(BigInt)  # the sum of its lines
    tax_nanos: Mapped[int] = mapped_column(BigInt)
    rounding_nanos: Mapped[int] = mapped_column(BigInt)
    payable_nanos: Mapped[int] = mapped_column(BigInt)
    net: Mapped[int] = mapped_column(Digits)
    tax: Mapped[int] = mapped_column(Digits)
    rounding: Mapped[int] = mapped_column(Digits)
    payable_minor: Mapped[int] = mapped_column(BigInt)
    corrects: Mapped[str | None] = mapped_column(String(40), index=True)  # the number that a credit note corrects
    reason: Mapped[str | None] = mapped_column(String(255))
    key: Mapped[str | None] = mapped_column(String(160), unique=True)  # makes a credit note idempotent

    @property
    def project_ids(self) -> list[str]:
        return [str(project["id"]) for project in self.projects]


class InvoiceLine(Base):
    """A row of an invoice: tokens of a kind at a price, or an amount alone."""

    __tablename__ = "invoice_lines"

    invoice_id: Mapped[str] = mapped_column(ForeignKey("invoices.id"), primary_key=True)
    no: Mapped[int] = mapped_column(Integer, primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(255))
    tier: Mapped[str] = mapped_column(String(32))
    kind: Mapped[str] = mapped_column(String(24))  # as in line_items.py, or refund, goodwill, credit
    price_version: Mapped[int] = mapped_column(Integer)
    tokens: Mapped[int] = mapped_column(BigInt)
    rate_nanos: Mapped[int | None] = mapped_column(BigInt)
    amount_nanos: Mapped[int] = mapped_column(BigInt)
    reverses: Mapped[str | None] = mapped_column(String(40))  # an invoice, or a month that had none
    batch_id: Mapped[str | None] = mapped_column(String(64))


class InvoiceCorrection(Base):
    """What a posting on an invoice corrects: a row of its CSV. Known when it was made, and never found again."""

    __tablename__ = "invoice_corrections"

    invoice_id: Mapped[str] = mapped_column(ForeignKey("invoices.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(160), primary_key=True)  # the posting's
    corrects: Mapped[str] = mapped_column(String(40))  # an invoice, or a month that had none


class InvoiceClaim(Base):
    """A month of a project that was billed: the key lets it be billed once. A void invoice gives its claims back."""

    __tablename__ = "invoice_claims"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    month: Mapped[str] = mapped_column(String(7), primary_key=True)
    invoice_id: Mapped[str] = mapped_column(ForeignKey("invoices.id"), index=True)
