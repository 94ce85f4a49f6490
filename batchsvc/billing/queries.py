"""The SQL of money: reading the price book, storing postings and usage rows once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, Table, Text, column, delete, func, select, table, text, update
from sqlalchemy.orm import Session

from batchsvc.billing.ledger import Posting, reserved, revenue
from batchsvc.billing.limits import Funds
from batchsvc.billing.tables import Balance, CallHold, LedgerEntry, LedgerTransaction, Price, UsageRow
from batchsvc.db.insert import insert

_BATCHES = table("batches", column("id", Text), column("project_id", Text))  # of a feature that is built on this one

NO_BATCH = ""
"""What stands in the usage of an interactive call where that of a part has its batch."""


def has_batch(session: Session, project_id: str, batch_id: str) -> bool:
    """Whether it is a batch of this project."""
    mine = select(_BATCHES.c.id).where(_BATCHES.c.id == batch_id, _BATCHES.c.project_id == project_id)
    return session.scalar(mine) is not None


def version_in_force(session: Session, at_ms: int) -> int | None:
    """The version that came into force last, at `at_ms` or before."""
    newest_first = (Price.effective_ms.desc(), Price.version.desc())
    return session.scalar(select(Price.version).where(Price.effective_ms <= at_ms).order_by(*newest_first).limit(1))


def versions(session: Session) -> dict[int, int]:
    """When each version comes into force, oldest version first."""
    found = select(Price.version, func.min(Price.effective_ms)).group_by(Price.version).order_by(Price.version)
    return {row[0]: row[1] for row in session.execute(found)}


def prices(session: Session, version: int) -> list[Price]:
    """All rates of a version."""
    return list(session.scalars(select(Price).where(Price.version == version).order_by(Price.model, Price.tier)))


def has_version(session: Session, version: int) -> bool:
    """Whether a version has any rate."""
    return session.scalar(select(Price.id).where(Price.version == version).limit(1)) is not None


def lock_prices(session: Session) -> None:
    """Hold off whoever else would make a version, until this transaction ends."""
    if session.get_bind().dialect.name != "sqlite":  # which has one writer at a time
        session.execute(text("LOCK TABLE prices IN SHARE ROW EXCLUSIVE MODE"))


def rates_of(session: Session, version: int, model: str, tier: str) -> dict[str, int]:
    """Nano-dollars per million tokens by kind; empty when the book has no such row."""
    rows = session.execute(
        select(Price.kind, Price.nanos_per_mtok).where(
            Price.version == version, Price.model == model, Price.tier == tier
        )
    )
    return {row.kind: row.nanos_per_mtok for row in rows}


def has_tier(session: Session, version: int, tier: str) -> bool:
    """Whether any model has a rate of this tier."""
    found = select(Price.id).where(Price.version == version, Price.tier == tier).limit(1)
    return session.scalar(found) is not None


def insert_prices(session: Session, rows: list[dict[str, Any]]) -> None:
    """Adds rates; those that exist stay as they are, because a version is never changed."""
    for row in rows:
        _insert_once(session, Price, row, ("version", "model", "tier", "kind"))


def insert_posting(session: Session, posting: Posting, *, price_version: int, created_ms: int) -> bool:
    """Stores a posting and its entries. False, and nothing changes, when its key is stored already."""
    transaction_id = _insert_once(
        session,
        LedgerTransaction,
        {
            "kind": posting.kind,
            "key": posting.key,
            "project_id": posting.project_id,
            "batch_id": posting.batch_id,
            "part_id": posting.part_id,
            "corrects_month": posting.corrects_month,
            "reason": posting.reason,
            "actor": posting.actor,
            "price_version": price_version,
            "created_ms": created_ms,
        },
        ("key",),
    )
    if transaction_id is None:
        return False
    session.add_all(
        LedgerEntry(transaction_id=transaction_id, account=account, amount_nanos=amount)
        for account, amount in posting.entries()
    )
    session.flush()
    return True


def transaction(session: Session, key: str) -> LedgerTransaction | None:
    """The posting of a key."""
    return session.scalars(select(LedgerTransaction).where(LedgerTransaction.key == key)).first()


def amount_nanos(session: Session, transaction_id: int) -> int:
    """What a posting moved."""
    moved = select(func.max(LedgerEntry.amount_nanos)).where(LedgerEntry.transaction_id == transaction_id)
    return session.scalar(moved) or 0


def locked_funds(session: Session, project_id: str) -> Funds:
    """What a project has, held until this transaction ends: nobody else reserves or refunds meanwhile."""
    _insert_once(session, Balance, _NOTHING | {"project_id": project_id}, ("project_id",))
    found = select(Balance).where(Balance.project_id == project_id).with_for_update()
    return _funds(session.scalars(found.execution_options(populate_existing=True)).one())


def funds(session: Session, project_id: str) -> Funds:
    """What a project has at this moment."""
    row = session.get(Balance, project_id, populate_existing=True)
    return Funds() if row is None else _funds(row)


def funds_of(session: Session, project_ids: Iterable[str]) -> dict[str, Funds]:
    """What these projects have at this moment; one that never had anything is missing."""
    rows = session.scalars(select(Balance).where(Balance.project_id.in_(set(project_ids))))
    return {row.project_id: _funds(row) for row in rows}


def charged_nanos(session: Session, project_id: str, batch_id: str | None) -> int:
    """What a batch, or all of a project, was charged, less what was refunded.

    Credit notes aren't taken off: their postings name who pays, whoever used what they give back. They count against
    their invoice (`left_nanos` of billing/correction_queries.py).
    """
    which: list[ColumnElement[bool]] = [
        LedgerTransaction.project_id == project_id,
        LedgerEntry.account == revenue(project_id),
    ]
    if batch_id is not None:
        which.append(LedgerTransaction.batch_id == batch_id)
    total = session.scalar(
        select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(*which, LedgerTransaction.kind.in_(("part", "void", "call", "refund")))
    )
    return int(total or 0)


def account_nanos(session: Session, account: str) -> int:
    """The balance of an account."""
    total = select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0)).where(LedgerEntry.account == account)
    return int(session.scalar(total) or 0)


def held_nanos(session: Session, project_id: str, batch_id: str) -> int:
    """What a batch still holds in `reserved`: its reservation less its parts and releases."""
    total = session.scalar(
        select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(LedgerTransaction.batch_id == batch_id, LedgerEntry.account == reserved(project_id))
    )
    return int(total or 0)


def held_by_calls(session: Session, project_id: str, now_ms: int) -> int:
    """What a project's calls that run may yet cost. Served by ix_call_holds_project."""
    mine = (CallHold.project_id == project_id, CallHold.expires_ms > now_ms)
    return int(session.scalar(select(func.coalesce(func.sum(CallHold.amount_nanos), 0)).where(*mine)) or 0)


def insert_hold(session: Session, call_id: str, project_id: str, amount_nanos: int, expires_ms: int) -> None:
    """Holds something for a call, once."""
    row = {"id": call_id, "project_id": project_id, "amount_nanos": amount_nanos, "expires_ms": expires_ms}
    _insert_once(session, CallHold, row, ("id",))


def renew_hold(session: Session, call_id: str, expires_ms: int) -> None:
    """Hold on to what is held for a call. One that was forgotten stays so: its call may have ended."""
    session.execute(update(CallHold).where(CallHold.id == call_id).values(expires_ms=expires_ms))


def drop_hold(session: Session, call_id: str) -> None:
    """Forget what was held for a call."""
    session.execute(delete(CallHold).where(CallHold.id == call_id))


def drop_expired_holds(session: Session, project_id: str, now_ms: int) -> None:
    """Forget what was held for a project's calls whose process died. Served by ix_call_holds_project."""
    session.execute(delete(CallHold).where(CallHold.project_id == project_id, CallHold.expires_ms <= now_ms))


def insert_usage(session: Session, row: dict[str, Any]) -> None:
    """Stores the usage of a part or a call, once."""
    _insert_once(session, UsageRow, row, ("part_id",))


_NOTHING = {"available_nanos": 0, "reserved_nanos": 0, "month": 0, "month_nanos": 0}


def _funds(row: Balance) -> Funds:
    return Funds(
        available_nanos=row.available_nanos,
        reserved_nanos=row.reserved_nanos,
        month=row.month,
        month_nanos=row.month_nanos,
    )


def _insert_once(session: Session, table: type[Any], row: dict[str, Any], unique: tuple[str, ...]) -> Any | None:
    """Primary key of the new row, or None when one with the same unique columns exists."""
    target: Table = table.__table__
    (primary,) = target.primary_key.columns
    new = insert(session, target).values(row)
    return session.scalar(new.on_conflict_do_nothing(index_elements=unique).returning(primary))


def drift_nanos(session: Session) -> int:
    """What all entries of the ledger sum to: 0, or something was posted on one side alone."""
    return int(session.scalar(select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))) or 0)
