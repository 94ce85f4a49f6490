"""SQL of unfinished sequences: which object a unit's row names, under the fence of the unit's epoch."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.batches import poison_queries, progress_queries
from batchsvc.batches.tables import Batch, Unit
from batchsvc.db.session import database_now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSequences:
    """What runs of a unit and has no result yet. Without `key` it is counted, and what was stored before stays."""

    num_lines: int
    num_tokens: int
    key: str | None = None
    sha256: str | None = None


def save(session: Session, unit_id: str, epoch: int, saved: SavedSequences) -> bool:
    """Let a unit's next owner begin with these sequences. False: the unit is lost, nothing was written."""
    batch_id = session.scalar(select(Unit.batch_id).where(Unit.id == unit_id))
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True) if batch_id else None
    unit = session.get(Unit, unit_id, with_for_update=True, populate_existing=True)
    if batch is None or unit is None or unit.state != "leased" or unit.epoch != epoch:
        return False
    has_grown = saved.num_tokens > unit.running_tokens
    progress_queries.set_running(batch, unit, lines=saved.num_lines, tokens=saved.num_tokens)
    if saved.key is not None:
        unit.resume_key, unit.resume_sha256 = saved.key, saved.sha256
        if has_grown:  # else an owner has saved what it was given
            poison_queries.note_saved(batch, unit)
    progress_queries.note_work(batch, database_now_ms(session))
    return True
