"""SQL of batches that may not move: what stuck.py wants to know of each unfinished one, of all projects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from batchsvc.batches import hold_queries, model_pins, waiting, worker_queries
from batchsvc.batches.lifecycle import UNFINISHED, Status
from batchsvc.batches.offpeak import Night
from batchsvc.batches.stuck import Facts, Holder
from batchsvc.batches.tables import Batch, ClaimHold, Part, Unit, Worker
from batchsvc.batches.waiting import Surroundings

_MOST = 1_000  # batches in a list: the oldest
_MERGING = (Status.FINALIZING, Status.CANCELLING)


@dataclass(slots=True)
class _Units:
    """Of one batch. `left`: not done, whatever their state."""

    ready: int = 0
    delayed: int = 0
    leased: int = 0
    suspects: int = 0
    left: int = 0


def unfinished(session: Session) -> list[Batch]:
    """The oldest batches that haven't ended, of all projects. Served by ix_batches_status."""
    found = select(Batch).where(Batch.status.in_(UNFINISHED)).order_by(Batch.created_ms, Batch.id)
    return list(session.scalars(found.limit(_MOST)))


def facts(session: Session, rows: Sequence[Batch], night: Night, renew_s: float) -> dict[str, Facts]:
    """What is known of each of these unfinished batches."""
    around = waiting.look_around(session, rows, night, renew_s)
    since_ms = waiting.alive_since_ms(session, renew_s)
    batch_ids = [row.id for row in rows]
    units, parts = _units(session, batch_ids, around.now_ms), _newest_parts(session, batch_ids)
    holders, holds = _holders(session, batch_ids, since_ms), hold_queries.every(session)
    drained = _drained(session, holds, since_ms)
    found = {}
    for row in rows:
        mine = units[row.id]
        since = max(parts.get(row.id, 0), row.in_progress_ms or row.created_ms)
        starts = waiting.scheduled_ms(row, around)
        hold_model, hold_reason = _hold(row, holds, around)
        in_turn = around.in_turn.get(row.id)
        found[row.id] = Facts(
            id=row.id,
            project=row.project_id,
            status=Status(row.status),
            model=row.model_id or ", ".join(sorted(row.models or {})) or row.model_requested or "",
            pause_reason=row.pause_reason if row.is_paused else None,
            is_own_pause=row.is_own_pause,
            has_quota=row.has_quota,
            has_budget=row.has_budget,
            later=None if starts is None else f"off-peak, from {around.night.label(starts)} on",
            hold_reason=hold_reason,
            hold_model=hold_model,
            lacking=around.lacking.get(row.id),
            in_turn=in_turn.for_operators if in_turn else None,
            drained=[name for pin in model_pins.pins_of(row) for name in drained[pin.digest]],
            ready=mine.ready,
            delayed=mine.delayed,
            leased=mine.leased,
            suspects=mine.suspects,
            holders=holders[row.id],
            moved_s=max(around.now_ms - since, 0) / 1000,
            overdue_s=(around.now_ms - row.expires_ms) / 1000,
            unattended_s=_unattended_s(row, mine, around.now_ms, since),
            is_store_away=row.status == Status.VALIDATING
            and row.plan_owner is None
            and row.plan_lease_ms > around.now_ms,
            fin_attempts=row.fin_epoch,
        )
    return found


def _unattended_s(row: Batch, units: _Units, now_ms: int, moved_ms: int) -> float | None:
    """Since when a control worker should have taken it up, in seconds; None: one has, or need not."""
    if row.status == Status.VALIDATING:
        since = max(row.plan_lease_ms, row.created_ms)
    elif row.status in _MERGING:
        since = max(row.fin_lease_ms, row.finalizing_ms or 0, row.cancelling_ms or 0)
    elif row.status == Status.IN_PROGRESS and not units.left:
        since = max(moved_ms, row.fin_lease_ms)
    else:
        return None
    return (now_ms - since) / 1000 if since < now_ms else None


def _hold(row: Batch, holds: dict[str, ClaimHold], around: Surroundings) -> tuple[str | None, str | None]:
    """The model whose claims are paused, "" for all, and why; None: they aren't."""
    if row.id not in around.held:
        return None, None
    if hold_queries.EVERYTHING in holds:
        return "", around.held[row.id]
    names = [pin.id for pin in model_pins.pins_of(row)]
    return (names[0] if names else ""), around.held[row.id]


def _units(session: Session, batch_ids: Sequence[str], now_ms: int) -> dict[str, _Units]:
    is_later = case((Unit.not_before_ms > now_ms, 1), else_=0)
    suspects = func.sum(case((Unit.is_suspect, 1), else_=0))
    counted = (
        select(
            Unit.batch_id, Unit.state, is_later.label("is_later"), func.count().label("num"), suspects.label("suspects")
        )
        .where(Unit.batch_id.in_(batch_ids), Unit.state.in_(("pending", "ready", "leased")))
        .group_by(Unit.batch_id, Unit.state, "is_later")
    )
    found: dict[str, _Units] = defaultdict(_Units)
    for row in session.execute(counted):
        one = found[row.batch_id]
        one.left += row.num
        one.suspects += int(row.suspects)
        if row.state == "leased":
            one.leased += row.num
        elif row.state == "ready" and row.is_later:
            one.delayed += row.num
        elif row.state == "ready":
            one.ready += row.num
    return found


def _newest_parts(session: Session, batch_ids: Sequence[str]) -> dict[str, int]:
    newest = select(Part.batch_id, func.max(Part.created_ms)).where(Part.batch_id.in_(batch_ids))
    return {batch_id: int(at_ms) for batch_id, at_ms in session.execute(newest.group_by(Part.batch_id))}


def _holders(session: Session, batch_ids: Sequence[str], since_ms: int) -> dict[str, list[Holder]]:
    held = (
        select(Unit.batch_id, Unit.owner, func.count(), func.max(Worker.name), func.max(Worker.beat_ms))
        .outerjoin(Worker, Worker.id == Unit.owner)
        .where(Unit.batch_id.in_(batch_ids), Unit.state == "leased")
        .group_by(Unit.batch_id, Unit.owner)
    )
    found: dict[str, list[Holder]] = defaultdict(list)
    for batch_id, owner, units, name, beat_ms in session.execute(held):
        found[batch_id].append(Holder(name or owner or "?", units, beat_ms is not None and beat_ms >= since_ms))
    return found


def _drained(session: Session, holds: dict[str, ClaimHold], since_ms: int) -> dict[str, list[str]]:
    """Names of living workers that are drained, by the digests of what they serve."""
    found: dict[str, list[str]] = defaultdict(list)
    for worker in worker_queries.alive(session, since_ms, with_test_mode=True):
        for name in (worker.name, worker.id):
            if name is not None and hold_queries.WORKER + name in holds:
                for digest in {worker.model_digest, *(worker.models or [])}:
                    found[digest].append(name)
                break
    return found
