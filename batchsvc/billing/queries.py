"""The SQL of money: reading the price book, storing postings and usage rows once."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from batchsvc.billing.ledger import Posting, reserved
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction, Price, UsageRow


def newest_version(session: Session, now_ms: int) -> int | None:
    """Version of the price book in force at `now_ms`."""
    return session.scalar(select(func.max(Price.version)).where(Price.effective_ms <= now_ms))


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


def held_nanos(session: Session, project_id: str, batch_id: str) -> int:
    """What a batch still holds in `reserved`: its reservation less its parts and releases."""
    total = session.scalar(
        select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
        .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
        .where(LedgerTransaction.batch_id == batch_id, LedgerEntry.account == reserved(project_id))
    )
    return int(total or 0)


def insert_usage(session: Session, row: dict[str, Any]) -> None:
    """Stores the usage of a part, once."""
    _insert_once(session, UsageRow, row, ("part_id",))


def _insert_once(session: Session, table: type[Any], row: dict[str, Any], unique: tuple[str, ...]) -> Any | None:
    """Primary key of the new row, or None when one with the same unique columns exists."""
    target: Table = table.__table__
    dialect = session.get_bind().dialect.name
    (primary,) = target.primary_key.columns
    insert = sqlite.insert(target) if dialect == "sqlite" else postgresql.insert(target)
    return session.scalar(insert.values(row).on_conflict_do_nothing(index_elements=unique).returning(primary))
