"""Which ended batch the reaper adds up next, and what came of it; the audit itself is another's."""

from __future__ import annotations

from sqlalchemy import exists, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from batchsvc.batches.reconcile import Report
from batchsvc.batches.tables import Batch, Reconciliation
from batchsvc.db.session import database_now_ms

_MOST_LINES = 20_000  # of a batch that is added up between other repairs
_RECENT_MS = 86_400_000
_FIRST_CHARS = 500


def next_batch(session: Session, period_s: float) -> str | None:
    """The newest batch that ended lately, is small and wasn't added up; None while the last one is fresh."""
    now = database_now_ms(session)
    last_ms = session.scalar(select(func.max(Reconciliation.checked_ms)))
    if last_ms is not None and last_ms > now - period_s * 1000:
        return None
    known = exists(select(Reconciliation.batch_id).where(Reconciliation.batch_id == Batch.id))
    ended = select(Batch.id).where(
        Batch.ended_ms >= now - _RECENT_MS, Batch.in_progress_ms.is_not(None), Batch.total <= _MOST_LINES, ~known
    )
    return session.scalars(ended.order_by(Batch.ended_ms.desc()).limit(1)).first()


def note(session: Session, batch_id: str, report: Report) -> None:
    """Keep what was found; another process may have done so."""
    insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
    row = {
        "batch_id": batch_id,
        "checked_ms": database_now_ms(session),
        "num_differences": report.num_differences,
        "first": str(report.differences[0])[:_FIRST_CHARS] if report.differences else None,
    }
    session.execute(insert(Reconciliation).values(row).on_conflict_do_nothing())


def counts(session: Session) -> tuple[int, int]:
    """How many batches were ever added up, and how many numbers differed."""
    found = select(func.count(), func.coalesce(func.sum(Reconciliation.num_differences), 0))
    row = session.execute(found.select_from(Reconciliation)).one()
    return int(row[0]), int(row[1])
