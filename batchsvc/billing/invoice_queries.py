"""The SQL of invoices: what a month's usage and refunds are, numbers without gaps, parties and claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.orm import Session, aliased

from batchsvc.billing.invoice import InvoiceStatus
from batchsvc.billing.invoice_tables import (
    BillingParty,
    Invoice,
    InvoiceClaim,
    InvoiceCorrection,
    InvoiceLine,
    InvoiceSeries,
)
from batchsvc.billing.ledger import CREDITS, REVENUE
from batchsvc.billing.month import Month
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction, UsageRow
from batchsvc.db.insert import insert

_VOID = "void:"
_Original = aliased(UsageRow, name="original")


class UsageSum(NamedTuple):
    """Usage of a project at one price."""

    project_id: str
    model: str
    tier: str
    price_version: int
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int


class Reversal(NamedTuple):
    """Usage that is taken back from an earlier month: all counts are negative."""

    key: str
    usage: UsageSum
    original_ms: int


class GivenBack(NamedTuple):
    """A refund, which is taken out of revenue, or a goodwill credit; the amount is below 0."""

    kind: str
    project_id: str
    batch_id: str | None
    key: str
    created_ms: int
    amount_nanos: int
    corrects: Month | None


class UsageDetail(NamedTuple):
    """A usage row as the CSV shows it."""

    project_id: str
    batch_id: str
    part_id: str
    created_ms: int
    model: str
    tier: str
    price_version: int
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int


# -- usage of a month ----------------------------------------------------------------------------------------------


def usage_sums(session: Session, projects: Sequence[str], month: Month) -> list[UsageSum]:
    """The month's usage by price; what it takes back, be it from earlier months, is taken off."""
    keys = (UsageRow.project_id, UsageRow.model, UsageRow.tier, UsageRow.price_version)
    counts = (
        UsageRow.requests,
        UsageRow.input_tokens,
        UsageRow.cached_tokens,
        UsageRow.output_tokens,
        UsageRow.cost_nanos,
    )
    rows = session.execute(
        select(*keys, *(func.sum(count) for count in counts))
        .where(_in_month(projects, month))
        .group_by(*keys)
        .order_by(*keys)
    )
    return [UsageSum(*row[:4], *map(int, row[4:])) for row in rows]


def reversals(session: Session, projects: Sequence[str], month: Month) -> list[Reversal]:
    """What the month takes back from earlier ones, row by row."""
    rows = session.execute(
        select(
            UsageRow.project_id,
            UsageRow.model,
            UsageRow.tier,
            UsageRow.price_version,
            UsageRow.requests,
            UsageRow.input_tokens,
            UsageRow.cached_tokens,
            UsageRow.output_tokens,
            UsageRow.cost_nanos,
            _Original.created_ms,
            UsageRow.part_id,
        )
        .join(_Original, _is_reversal_before(month))
        .where(_in_month(projects, month))
        .order_by(UsageRow.part_id)
    )
    return [Reversal(row[10], UsageSum(*row[:9]), row[9]) for row in rows]


def given_back(session: Session, projects: Sequence[str], month: Month) -> list[GivenBack]:
    """The month's refunds and goodwill credits, in order."""
    posting = LedgerTransaction
    rows = session.execute(
        select(
            posting.kind,
            posting.project_id,
            posting.batch_id,
            posting.key,
            posting.created_ms,
            LedgerEntry.amount_nanos,
            posting.corrects_month,
        )
        .join(LedgerEntry, LedgerEntry.transaction_id == posting.id)
        .where(
            posting.project_id.in_(projects),
            posting.created_ms >= month.start_ms,
            posting.created_ms < month.end_ms,
            ((posting.kind == "refund") & (LedgerEntry.account == REVENUE))
            | ((posting.kind == "credit") & (LedgerEntry.account == CREDITS)),
        )
        .order_by(posting.id)
    )
    return [GivenBack(*row[:6], Month.parse(row[6]) if row[6] else None) for row in rows]


def usage_details(session: Session, projects: Sequence[str], month: Month) -> Iterator[UsageDetail]:
    """Every usage row of the month, oldest first, streamed."""
    rows = session.execute(
        select(
            UsageRow.project_id,
            UsageRow.batch_id,
            UsageRow.part_id,
            UsageRow.created_ms,
            UsageRow.model,
            UsageRow.tier,
            UsageRow.price_version,
            UsageRow.requests,
            UsageRow.input_tokens,
            UsageRow.cached_tokens,
            UsageRow.output_tokens,
            UsageRow.cost_nanos,
        )
        .where(_in_month(projects, month))
        .order_by(UsageRow.created_ms, UsageRow.part_id)
        .execution_options(yield_per=2000)
    )
    for row in rows:
        yield UsageDetail._make(row)


def _in_month(projects: Sequence[str], month: Month) -> ColumnElement[bool]:
    return (
        UsageRow.project_id.in_(projects)
        & (UsageRow.created_ms >= month.start_ms)
        & (UsageRow.created_ms < month.end_ms)
    )


def _is_reversal_before(month: Month) -> ColumnElement[bool]:
    """Joins a row that takes a part back with the part, where that was used before the month."""
    return (
        UsageRow.part_id.startswith(_VOID)
        & (_Original.part_id == func.substr(UsageRow.part_id, len(_VOID) + 1))
        & (_Original.created_ms < month.start_ms)
    )


# -- invoices ------------------------------------------------------------------------------------------------------


def take_number(session: Session, series: str) -> int:
    """The next number of a series, held until the transaction ends: others wait, and a rollback gives it back."""
    session.execute(insert(session, InvoiceSeries).values(series=series, last=0).on_conflict_do_nothing())
    taken = (
        update(InvoiceSeries)
        .where(InvoiceSeries.series == series)
        .values(last=InvoiceSeries.last + 1)
        .returning(InvoiceSeries.last)
    )
    return int(session.execute(taken).scalar_one())


def claim(session: Session, projects: Sequence[str], month: str, invoice_id: str) -> str | None:
    """Marks a month of each project as billed by this invoice; else the id of an invoice that has one of them."""
    for project_id in projects:
        row = {"project_id": project_id, "month": month, "invoice_id": invoice_id}
        session.execute(insert(session, InvoiceClaim).values(row).on_conflict_do_nothing())
        owner = session.scalar(
            select(InvoiceClaim.invoice_id).where(InvoiceClaim.project_id == project_id, InvoiceClaim.month == month)
        )
        if owner != invoice_id:
            return owner
    return None


def give_back_claims(session: Session, invoice_id: str) -> None:
    """Lets the months of a void invoice be billed again."""
    session.execute(delete(InvoiceClaim).where(InvoiceClaim.invoice_id == invoice_id))


def billed(session: Session, projects: Sequence[str]) -> dict[tuple[str, str], str]:
    """Numbers of invoices by (project, month)."""
    rows = session.execute(
        select(InvoiceClaim.project_id, InvoiceClaim.month, Invoice.number)
        .join(Invoice, Invoice.id == InvoiceClaim.invoice_id)
        .where(InvoiceClaim.project_id.in_(projects))
    )
    return {(row.project_id, row.month): str(row.number) for row in rows}


def invoice(session: Session, name: str) -> Invoice | None:
    """An invoice by its id or its number, locked against other changes."""
    found = select(Invoice).where((Invoice.id == name) | (Invoice.number == name)).with_for_update()
    return session.scalars(found.execution_options(populate_existing=True)).one_or_none()


def read_invoice(session: Session, name: str) -> Invoice | None:
    """An invoice by its id or its number, to look at."""
    return session.scalars(select(Invoice).where((Invoice.id == name) | (Invoice.number == name))).one_or_none()


def invoice_by_key(session: Session, key: str) -> Invoice | None:
    """The credit note that was made with this key."""
    return session.scalars(select(Invoice).where(Invoice.key == key)).one_or_none()


def invoices(session: Session, *, project_id: str | None, month: str | None, status: str | None) -> list[Invoice]:
    """Invoices and credit notes, oldest first."""
    query = select(Invoice).order_by(Invoice.created_ms, Invoice.id)
    for column, value in ((Invoice.project_id, project_id), (Invoice.month, month), (Invoice.status, status)):
        if value is not None:
            query = query.where(column == value)
    return list(session.scalars(query))


def lines(session: Session, invoice_id: str) -> list[InvoiceLine]:
    """The rows of an invoice in their order."""
    return list(
        session.scalars(select(InvoiceLine).where(InvoiceLine.invoice_id == invoice_id).order_by(InvoiceLine.no))
    )


def corrections(session: Session, invoice_id: str) -> dict[str, str]:
    """What the postings on an invoice correct, by their keys, as it was known when the invoice was made."""
    rows = select(InvoiceCorrection.key, InvoiceCorrection.corrects).where(InvoiceCorrection.invoice_id == invoice_id)
    return {row.key: row.corrects for row in session.execute(rows)}


def credit_notes(session: Session, number: str) -> list[Invoice]:
    """The credit notes that correct an invoice."""
    return list(session.scalars(select(Invoice).where(Invoice.corrects == number).order_by(Invoice.no)))


def drop_drafts(session: Session, project_id: str, month: str) -> None:
    """Deletes the drafts of a month, for a new one to take their place."""
    drafts = select(Invoice.id).where(
        Invoice.project_id == project_id, Invoice.month == month, Invoice.status == InvoiceStatus.DRAFT
    )
    ids = list(session.scalars(drafts))
    session.execute(delete(InvoiceLine).where(InvoiceLine.invoice_id.in_(ids)))
    session.execute(delete(InvoiceCorrection).where(InvoiceCorrection.invoice_id.in_(ids)))
    session.execute(delete(Invoice).where(Invoice.id.in_(ids)))


# -- parties -------------------------------------------------------------------------------------------------------


def party(session: Session, project_id: str) -> BillingParty | None:
    """To whom a project is billed, if somebody said so."""
    return session.get(BillingParty, project_id)


def billed_to(session: Session, project_id: str) -> list[str]:
    """Other projects whose usage this project pays."""
    return list(
        session.scalars(
            select(BillingParty.project_id).where(BillingParty.bill_to == project_id).order_by(BillingParty.project_id)
        )
    )


def insert_lines(session: Session, rows: list[dict[str, Any]]) -> None:
    """Adds the rows of a draft."""
    session.add_all(InvoiceLine(**row) for row in rows)
    session.flush()


def insert_corrections(session: Session, invoice_id: str, corrections: Mapping[str, str]) -> None:
    """Notes what the postings on a draft correct."""
    session.add_all(
        InvoiceCorrection(invoice_id=invoice_id, key=key, corrects=corrects) for key, corrects in corrections.items()
    )
    session.flush()


def open_invoices(session: Session, project_id: str) -> list[Invoice]:
    """The invoices that a project has yet to pay; credit notes of months are settled with the next payment."""
    unpaid = (InvoiceStatus.ISSUED, InvoiceStatus.DISPUTED)
    query = select(Invoice).where(
        Invoice.project_id == project_id, Invoice.status.in_(unpaid), Invoice.kind == "invoice"
    )
    return list(session.scalars(query.order_by(Invoice.no)))
