"""Which ended batch the reaper adds up next, and what came of it; the audit itself is another's."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import exists, func, select
from sqlalchemy.orm import Session

from batchsvc.batches.reconcile import Report
from batchsvc.batches.tables import Batch, Reconciliation
from batchsvc.db.insert import insert
from batchsvc.db.session import database_now_ms

_MOST_LINES = 20_000  # of a batch that is added up between other repairs
_RECENT_MS = 86_400_000
_FIRST_CHARS = 500
_AGAIN_PERIODS = 12  # after which a batch that differed is added up again: somebody may have put it right


class Found(NamedTuple):
    """What the audits of single batches say, each batch as it was added up last."""

    batches: int
    differences: int
    unreconciled_nanos: int


def next_batch(session: Session, period_s: float) -> str | None:
    """A batch that differed a good while ago; else the newest one that ended lately, is small and wasn't added up. None
    while the last look is fresh. Without a period none is added up twice."""
    now = database_now_ms(session)
    last_ms = session.scalar(select(func.max(Reconciliation.checked_ms)))
    if last_ms is not None and last_ms > now - period_s * 1000:
        return None
    if period_s and (again := _differed(session, now - round(period_s * 1000 * _AGAIN_PERIODS))):
        return again
    known = exists(select(Reconciliation.batch_id).where(Reconciliation.batch_id == Batch.id))
    ended = select(Batch.id).where(
        Batch.ended_ms >= now - _RECENT_MS, Batch.in_progress_ms.is_not(None), Batch.total <= _MOST_LINES, ~known
    )
    return session.scalars(ended.order_by(Batch.ended_ms.desc()).limit(1)).first()


def _differed(session: Session, before_ms: int) -> str | None:
    differed = select(Reconciliation.batch_id).where(
        Reconciliation.num_differences > 0, Reconciliation.checked_ms <= before_ms
    )
    return session.scalars(differed.order_by(Reconciliation.checked_ms).limit(1)).first()


def note(session: Session, batch_id: str, report: Report) -> None:
    """Keep what was found; the newest audit of a batch counts."""
    found = {
        "checked_ms": database_now_ms(session),
        "num_differences": report.num_differences,
        "unreconciled_nanos": report.unreconciled_nanos,
        "first": str(report.differences[0])[:_FIRST_CHARS] if report.differences else None,
    }
    noted = insert(session, Reconciliation).values({"batch_id": batch_id, **found})
    session.execute(noted.on_conflict_do_update(index_elements=("batch_id",), set_=found))


def counts(session: Session) -> Found:
    """All audits together."""
    sums = [
        func.coalesce(func.sum(column), 0)
        for column in (Reconciliation.num_differences, Reconciliation.unreconciled_nanos)
    ]
    return Found(*(int(number) for number in session.execute(select(func.count(), *sums)).one()))
