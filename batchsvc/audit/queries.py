"""SQL of the audit log: pages of rows that match a filter, newest first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.tables import AuditRow
from batchsvc.db.keyset import Cursor, page


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rows: empty or None is any. Of the moments, in milliseconds, the first is included, the second not."""

    actions: Collection[str] = ()
    actor_ids: Collection[str] = ()
    project_ids: Collection[str] = ()
    target_ids: Collection[str] = ()
    from_ms: int | None = None
    to_ms: int | None = None


def row(session: Session, row_id: str) -> AuditRow | None:
    """One row by its id."""
    return session.get(AuditRow, row_id)


def rows(
    session: Session, wanted: Filter, cursor: Cursor | None, limit: int, *, is_ascending: bool = False
) -> list[AuditRow]:
    """Rows beyond a cursor."""
    found = select(AuditRow)
    for column, values in (
        (AuditRow.action, wanted.actions),
        (AuditRow.actor_id, wanted.actor_ids),
        (AuditRow.project_id, wanted.project_ids),
        (AuditRow.target_id, wanted.target_ids),
    ):
        if values:
            found = found.where(column.in_(values))
    if wanted.from_ms is not None:
        found = found.where(AuditRow.effective_ms >= wanted.from_ms)
    if wanted.to_ms is not None:
        found = found.where(AuditRow.effective_ms < wanted.to_ms)
    return list(session.scalars(page(found, AuditRow.effective_ms, AuditRow.id, cursor, limit, is_ascending)))


def newest_detail(session: Session, action: Action, target_id: str, name: str) -> Any:
    """What the newest of these changes that tells of `name` has set it to; None, if none does."""
    these = (AuditRow.target_id == target_id, AuditRow.action == action.value)
    found = select(AuditRow.details).where(*these).order_by(AuditRow.effective_ms.desc(), AuditRow.id.desc())
    return next((details[name] for details in session.scalars(found) if name in details), None)
