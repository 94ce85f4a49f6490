"""The SQL of statements: what the ledger says of a project's accounts before and within a month."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import ColumnElement, case, func, null, select
from sqlalchemy.orm import Session

from batchsvc.billing.ledger import available, receivable, reserved
from batchsvc.billing.month import Month
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction


class Movement(NamedTuple):
    """One posting of an operator or an invoice, or all of a batch's parts in the month."""

    kind: str
    batch_id: str | None
    key: str | None
    reason: str | None
    last_ms: int
    postings: int
    amount_nanos: int


def balance_before(session: Session, project_id: str, ms: int) -> int:
    """The sum of a project's accounts over all postings before a time."""
    total = session.scalar(
        select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(_is_of(project_id), LedgerTransaction.created_ms < ms)
    )
    return int(total or 0)


def movements(session: Session, project_id: str, month: Month) -> list[Movement]:
    """What changed the balance in the month, in order; parts of a batch as one, moves between its accounts not."""
    is_part = LedgerTransaction.part_id.is_not(None)
    key = case((is_part, null()), else_=LedgerTransaction.key)
    groups = (LedgerTransaction.kind, LedgerTransaction.batch_id, key, LedgerTransaction.reason)
    total = func.sum(LedgerEntry.amount_nanos)
    rows = session.execute(
        select(*groups, func.max(LedgerTransaction.created_ms), func.count(LedgerTransaction.id.distinct()), total)
        .join(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id)
        .where(
            _is_of(project_id),
            LedgerTransaction.created_ms >= month.start_ms,
            LedgerTransaction.created_ms < month.end_ms,
        )
        .group_by(*groups)
        .having(total != 0)
        .order_by(func.max(LedgerTransaction.created_ms), func.max(LedgerTransaction.id))
    )
    return [Movement._make((*row[:6], int(row[6]))) for row in rows]


def _is_of(project_id: str) -> ColumnElement[bool]:
    return LedgerEntry.account.in_((available(project_id), reserved(project_id), receivable(project_id)))
