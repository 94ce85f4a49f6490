"""SQL of the reaper's other repairs: planners that went silent, deadlines, and objects that nobody needs.

What it does to units, workers and finalizers stands with these.
"""

from __future__ import annotations

from sqlalchemy import exists, func, select, update
from sqlalchemy.orm import Session

from batchsvc.batches import lifecycle
from batchsvc.batches.claim_rank import latest_start_ms
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Part, Unit, Window
from batchsvc.db.session import database_now_ms

_RATE_MS = 600_000  # how far back a rate is looked for,
_RATE_LEAST_MS = 10_000  # and over which time at least
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

    What remains is what was predicted less what is done; the rate is the model's over the last minutes. A batch is
    not written to for a change that doesn't matter, nor waited for when it is being written to.
    """
    now = database_now_ms(session)
    rates = _rates(session, now)
    changed: dict[str, int] = {}
    columns = (Batch.id, Batch.created_ms, Batch.expires_ms, Batch.est_tokens, Batch.est_done_tokens)
    running = select(*columns, Batch.model_digest, Batch.latest_start_ms).where(Batch.status == Status.IN_PROGRESS)
    for batch in session.execute(running):
        latest = latest_start_ms(
            created_ms=batch.created_ms,
            expires_ms=batch.expires_ms,
            remaining_tokens=max(0, batch.est_tokens - batch.est_done_tokens),
            tokens_per_s=rates.get(batch.model_digest or ""),
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


def _rates(session: Session, now_ms: int) -> dict[str, float]:
    """Predicted tokens a second that a model's workers finish, by digest. Served by ix_parts_created."""
    rows = session.execute(
        select(Unit.model_digest, func.sum(Part.est_tokens), func.min(Part.created_ms))
        .join(Unit, Unit.id == Part.unit_id)
        .where(Part.created_ms > now_ms - _RATE_MS, Part.unit_id.is_not(None), Part.is_void.is_(False))
        .group_by(Unit.model_digest)
    )
    spans = {digest or "": (int(tokens or 0), now_ms - first_ms) for digest, tokens, first_ms in rows}
    return {digest: tokens * 1000 / span_ms for digest, (tokens, span_ms) in spans.items() if span_ms >= _RATE_LEAST_MS}
