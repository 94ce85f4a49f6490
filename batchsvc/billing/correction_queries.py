"""The SQL of corrections: what of a month's usage was given back, by refunds, credit notes and reversals alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, String, and_, case, column, func, literal_column, select, table, text
from sqlalchemy.orm import Session, aliased

from batchsvc.billing.invoice_tables import Invoice, InvoiceClaim, InvoiceLine
from batchsvc.billing.ledger import CREDITS, REVENUE
from batchsvc.billing.month import Month
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction, UsageHour, UsageRow
from batchsvc.db.base import Json

_CORRECTS = text("ledger_transactions.kind IN ('refund', 'credit', 'credit_note')")  # in the words of the index
_VOID = "void:"
_BATCHES = table("batches", column("id", String), column("metadata", Json))  # of a feature that is built on this one
_METADATA = "metadata."


class Correction(NamedTuple):
    """Corrections of one kind in a bucket; `values` are those of the keys that were asked for."""

    bucket_ms: int
    values: tuple[Any, ...]
    kind: str
    amount_nanos: int


def left_by_month(session: Session, project_id: str, batch_id: str | None) -> dict[Month, int]:
    """What a batch, or all of a project, was charged for the usage of each month and wasn't refunded, newest first."""
    which = [UsageHour.project_id == project_id]
    refunded = [LedgerTransaction.project_id == project_id, LedgerTransaction.kind == "refund"]
    if batch_id is not None:
        which.append(UsageHour.batch_id == batch_id)
        refunded.append(LedgerTransaction.batch_id == batch_id)
    found: Counter[Month] = Counter()
    for hour_ms, amount in session.execute(
        select(UsageHour.hour_ms, func.sum(UsageHour.cost_nanos)).where(*which).group_by(UsageHour.hour_ms)
    ):
        found[Month.of(hour_ms)] += int(amount)
    for taken_ms, used_ms, amount in _reversals(session, [project_id], batch_id):
        found[Month.of(taken_ms)] -= amount  # out of the month in which that was noted, into that of the usage
        found[Month.of(used_ms)] += amount
    rows = select(LedgerTransaction.corrects_month, LedgerTransaction.created_ms, LedgerEntry.amount_nanos)
    for month, created_ms, amount in session.execute(
        rows.join(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id).where(
            *refunded, LedgerEntry.account == REVENUE
        )
    ):
        found[Month.parse(month) if month else Month.of(created_ms)] += amount
    return dict(sorted(found.items(), reverse=True))


def billing_invoice(session: Session, project_id: str, month: Month) -> Invoice | None:
    """The invoice on which a month of a project stands."""
    return session.scalars(
        select(Invoice)
        .join(InvoiceClaim, InvoiceClaim.invoice_id == Invoice.id)
        .where(InvoiceClaim.project_id == project_id, InvoiceClaim.month == str(month))
    ).one_or_none()


def left_nanos(session: Session, row: Invoice) -> int:
    """What of an invoice's own month wasn't given back by anything yet.

    Its rows that take earlier months back are left out: they count against the invoices that they correct.
    """
    own = select(func.coalesce(func.sum(InvoiceLine.amount_nanos), 0)).where(
        InvoiceLine.invoice_id == row.id, InvoiceLine.reverses.is_(None)
    )
    credited = select(func.coalesce(func.sum(Invoice.net_nanos), 0)).where(Invoice.corrects == row.number)
    return int(session.scalar(own) or 0) + int(session.scalar(credited) or 0) - given_back_nanos(session, row)


def given_back_nanos(session: Session, row: Invoice) -> int:
    """What later months took back of an invoice's usage, by refunds and reversals; credit notes are apart."""
    month = Month.parse(row.month)
    refunded = session.scalar(
        select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(
            LedgerTransaction.project_id.in_(row.project_ids),
            LedgerTransaction.kind == "refund",
            LedgerTransaction.corrects_month == str(month),
            LedgerTransaction.created_ms >= month.end_ms,  # earlier ones are rows of the invoice itself
            LedgerEntry.account == REVENUE,
        )
    )
    reversed_nanos = sum(
        amount
        for taken_ms, used_ms, amount in _reversals(session, row.project_ids, None)
        if taken_ms >= month.end_ms and month.start_ms <= used_ms < month.end_ms
    )
    return -int(refunded or 0) - reversed_nanos


def _reversals(session: Session, projects: Sequence[str], batch_id: str | None) -> list[tuple[int, int, int]]:
    """(when it was taken back, when it was used, the amount, below 0) of parts that were found damaged."""
    used = aliased(UsageRow, name="used")
    query = (
        select(UsageRow.created_ms, used.created_ms, UsageRow.cost_nanos)
        .join(used, used.part_id == func.substr(UsageRow.part_id, len(_VOID) + 1))
        .where(UsageRow.project_id.in_(projects), UsageRow.part_id.startswith(_VOID))
    )
    if batch_id is not None:
        query = query.where(UsageRow.batch_id == batch_id)
    return [(row[0], row[1], int(row[2])) for row in session.execute(query)]


def sums(
    session: Session,
    *,
    start_ms: int,
    end_ms: int,
    width_ms: int,
    keys: Sequence[str],
    filters: Mapping[str, Collection[str]],
) -> Iterator[Correction]:
    """Corrections by bucket and keys, in the time in which they were posted.

    Served by ix_ledger_transactions_corrections. What has no model, key or price behind it is null there, and left out
    where one of them is filtered by.
    """
    own = {"project_id": LedgerTransaction.project_id, "batch_id": LedgerTransaction.batch_id}
    if not filters.keys() <= own.keys():
        return
    width: ColumnElement[int] = literal_column(str(int(width_ms)), BigInteger)
    bucket = (LedgerTransaction.created_ms // width * width).label("bucket")
    named = [key for key in keys if key in own or key.startswith(_METADATA)]
    columns = [
        own[key] if key in own else _BATCHES.c.metadata[key.removeprefix(_METADATA)].as_string() for key in named
    ]
    labels = [one.label(f"key_{i}") for i, one in enumerate(columns)]
    is_counted = LedgerEntry.account == case((LedgerTransaction.kind == "credit", CREDITS), else_=REVENUE)
    query = (
        select(bucket, LedgerTransaction.kind, func.sum(LedgerEntry.amount_nanos), *labels)
        .join(LedgerEntry, and_(LedgerEntry.transaction_id == LedgerTransaction.id, is_counted))
        .where(
            _CORRECTS,
            LedgerTransaction.created_ms >= start_ms,
            LedgerTransaction.created_ms < end_ms,
            *(own[name].in_(values) for name, values in filters.items()),
        )
        .group_by(
            literal_column("bucket"),
            LedgerTransaction.kind,
            *(literal_column(f"key_{i}") for i in range(len(labels))),
        )
    )
    if any(key.startswith(_METADATA) for key in named):
        query = query.join(_BATCHES, _BATCHES.c.id == LedgerTransaction.batch_id, isouter=True)
    for bucket_ms, kind, amount, *values in session.execute(query):
        found = dict(zip(named, values, strict=True))
        yield Correction(bucket_ms, tuple(found.get(key) for key in keys), kind, int(amount))
