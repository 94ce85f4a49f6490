"""SQL of message batches: batches whose endpoint is /v1/messages, until somebody deletes them."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from batchsvc.batches.message_body import MESSAGES
from batchsvc.batches.tables import Batch, Unit
from batchsvc.db.keyset import Cursor, page


def message_batches(
    session: Session, project_id: str, *, beyond: Cursor | None, is_newer: bool, limit: int
) -> list[Batch]:
    """At most `limit` of a project, those next to `beyond` first. Served by ix_batches_listing."""
    wanted = select(Batch).where(Batch.project_id == project_id, Batch.endpoint == MESSAGES, Batch.deleted_ms.is_(None))
    return list(session.scalars(page(wanted, Batch.created_ms, Batch.id, beyond, limit, is_newer)))


def never_ran(session: Session, batch_ids: Collection[str]) -> dict[str, int]:
    """How many lines of these batches were left when they ended."""
    left = select(Unit.batch_id, func.sum(Unit.num_lines - Unit.num_done)).where(
        Unit.batch_id.in_(batch_ids), Unit.state == "sealed"
    )
    return {row[0]: int(row[1]) for row in session.execute(left.group_by(Unit.batch_id))}
