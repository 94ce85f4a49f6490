"""SQL of the reaper's other repairs: planners that went silent, deadlines, and objects that nobody needs.

What it does to units, workers and finalizers stands with these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from sqlalchemy import delete, exists, select
from sqlalchemy.orm import Session

from batchsvc.batches import lifecycle
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.tables import Batch, Garbage, Window
from batchsvc.db.session import database_now_ms


def plans_due(session: Session) -> list[str]:
    """Batches that nobody is planning."""
    now = database_now_ms(session)
    waiting = (Batch.status == Status.VALIDATING, Batch.plan_lease_ms < now, Batch.expires_ms > now)
    return list(session.scalars(select(Batch.id).where(*waiting).order_by(Batch.created_ms)))


def expire_unplanned(session: Session) -> list[str]:
    """End the batches whose time was over before their planning was: no lines, no files, no cost.

    What was planned of them is for `plan_queries.discard_unstarted` to forget.
    """
    now = database_now_ms(session)
    late = session.execute(
        select(Batch.id, Batch.plan_epoch)
        .where(Batch.status == Status.VALIDATING, Batch.expires_ms <= now)
        .with_for_update(skip_locked=True)
    ).all()
    for batch_id, plan_epoch in late:
        values = {"why": Status.EXPIRED, "plan_epoch": plan_epoch + 1, "total": 0, "completed": 0, "failed": 0}
        lifecycle.move(session, batch_id, Status.EXPIRED, now_ms=now, values=values)
    return [row.id for row in late]


def cancelled_plans(session: Session) -> list[str]:
    """Batches that were cancelled while they were planned and still have a plan: their planner is gone."""
    planned = exists(select(Window.no).where(Window.batch_id == Batch.id))
    unstarted = (Batch.status == Status.CANCELLED, Batch.in_progress_ms.is_(None))
    return list(session.scalars(select(Batch.id).where(*unstarted, planned)))


def discard(session: Session, keys: Iterable[str], *, grace_s: float = 0) -> None:
    """Have objects deleted after `grace_s`."""
    not_before = database_now_ms(session) + round(grace_s * 1000)
    for key in keys:
        session.merge(Garbage(s3_key=key, not_before_ms=not_before))


def garbage_due(session: Session, limit: int) -> list[str]:
    """Objects to delete now."""
    ripe = select(Garbage.s3_key).where(Garbage.not_before_ms <= database_now_ms(session))
    return list(session.scalars(ripe.order_by(Garbage.not_before_ms).limit(limit)))


def forget_garbage(session: Session, keys: Sequence[str]) -> None:
    """Note that objects are deleted."""
    session.execute(delete(Garbage).where(Garbage.s3_key.in_(keys)))


def running_batches(session: Session, batch_ids: Collection[str]) -> set[str]:
    """Those of these ids whose batch hasn't ended: their objects are no business of the audit."""
    running = select(Batch.id).where(Batch.id.in_(batch_ids), Batch.status.not_in(TERMINAL))
    return set(session.scalars(running))
