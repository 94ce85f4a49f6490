"""SQL of the reaper's other repairs: planners that went silent, deadlines, and objects that nobody needs.

What it does to units, workers and finalizers stands with these.
"""

from __future__ import annotations

from sqlalchemy import exists, select, update
from sqlalchemy.orm import Session

from batchsvc.batches import lifecycle, progress_queries
from batchsvc.batches.claim_rank import latest_start_ms
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Window
from batchsvc.db.session import database_now_ms

_SMALL_SHARE = 200  # of a window: half a percent


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


def keep_latest_starts(session: Session) -> int:
    """Set when each running batch must start, or be preferred, to end in time. Returns how many have changed.

    What remains is what was predicted less what is done; the rate is the model's over the last minutes. Of several
    models the one decides that must start first. A batch is not written to for a change that doesn't matter, nor waited
    for when it is being written to.
    """
    now = database_now_ms(session)
    rates = progress_queries.model_rates(session, now)
    changed: dict[str, int] = {}
    columns = (Batch.id, Batch.created_ms, Batch.expires_ms, Batch.est_tokens, Batch.est_done_tokens)
    select_running = select(*columns, Batch.model_digest, Batch.latest_start_ms)
    running = session.execute(select_running.where(Batch.status == Status.IN_PROGRESS)).all()
    mixed = progress_queries.left_by_model(session, [batch.id for batch in running if batch.model_digest is None])
    for batch in running:
        all_left = {batch.model_digest or "": max(0, batch.est_tokens - batch.est_done_tokens)}
        latest = min(
            latest_start_ms(
                created_ms=batch.created_ms,
                expires_ms=batch.expires_ms,
                remaining_tokens=tokens,
                tokens_per_s=rates.get(digest),
            )
            for digest, tokens in mixed.get(batch.id, all_left).items()
        )
        small_ms = (batch.expires_ms - batch.created_ms) // _SMALL_SHARE
        if batch.latest_start_ms is None or abs(latest - batch.latest_start_ms) > small_ms:
            changed[batch.id] = latest
    free = select(Batch.id).where(Batch.id.in_(changed)).order_by(Batch.id).with_for_update(skip_locked=True)
    free_ids = session.scalars(free).all()
    for batch_id in free_ids:
        session.execute(
            update(Batch)
            .where(Batch.id == batch_id)
            .values(latest_start_ms=changed[batch_id])
            .execution_options(synchronize_session=False)
        )
    return len(free_ids)
