"""SQL of test mode: the one thing that a magic prompt changes in the database, of batches of test keys alone."""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Unit
from batchsvc.db.session import database_now_ms


def expire_soon(session: Session, unit_id: str, in_s: float) -> None:
    """Let the batch of a unit expire in so many seconds, if it is one of test mode and lives longer than that."""
    at_ms = database_now_ms(session) + round(in_s * 1000)
    batch_id = select(Unit.batch_id).where(Unit.id == unit_id).scalar_subquery()
    soon = update(Batch).where(Batch.id == batch_id, Batch.expires_ms > at_ms, Batch.status == Status.IN_PROGRESS)
    session.execute(soon.where(Batch.project_id.like(mode.LIKE, escape="\\")).values(expires_ms=at_ms))
