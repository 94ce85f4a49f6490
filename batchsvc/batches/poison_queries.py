"""SQL of crashes: freeing what a dead engine held, and what follows from it for units and batches (see poison.py).

A unit is split without touching the store: both halves name the same immutable unit file, and each counts the other's
lines as done in its bitmap. So `num_lines - num_done` is what a unit still has to do, split or not, and its parts hold
only lines of its own.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.batches import poison, progress_queries, worker_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.poison import Verdict
from batchsvc.batches.tables import Batch, Part, Unit
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError, PermissionDeniedError

_RUNNING = (Status.IN_PROGRESS, Status.FINALIZING)


def end_leases(session: Session, which: ColumnElement[bool], *, delay_s: float = 0, skip_locked: bool = True) -> int:
    """Free leased units whose engine crashed, and draw the consequences. Returns how many.

    `skip_locked`: a unit that is locked is just being committed or renewed, so its owner lives.
    """
    lost = (Unit.state == "leased", which)
    batch_ids = session.scalars(select(Unit.batch_id).where(*lost).distinct()).all()
    if not batch_ids:
        return 0
    locked = select(Batch).where(Batch.id.in_(batch_ids)).order_by(Batch.id).with_for_update()
    batches = {batch.id: batch for batch in session.scalars(locked.execution_options(populate_existing=True))}
    now = database_now_ms(session)
    units = session.scalars(
        select(Unit)
        .where(*lost, Unit.batch_id.in_(batches))
        .order_by(Unit.id)
        .with_for_update(skip_locked=skip_locked)
        .execution_options(populate_existing=True)
    ).all()
    beside_calls = worker_queries.with_calls(session, {unit.owner for unit in units if unit.owner})
    braking = {unit.batch_id for unit in units if unit.is_suspect or unit.owner not in beside_calls}
    for unit in units:
        unit.state, unit.owner, unit.ticket_ms = "ready", None, 0
        unit.not_before_ms = now + round(delay_s * 1000)
        unit.crash_count += 1
        if batches[unit.batch_id].status in _RUNNING:
            _judge(session, batches[unit.batch_id], unit)
    for batch_id in sorted(braking):
        _brake(batches[batch_id], now)
    return len(units)


def note_progress(batch: Batch, unit: Unit) -> None:
    """Forget the crashes of a unit and its batch: a part of it counts now. The caller has locked both."""
    unit.crash_count, unit.is_suspect = 0, False
    if batch.crash_times:
        batch.crash_times = None


def note_saved(batch: Batch, unit: Unit) -> None:
    """The same when unfinished sequences were saved; a suspect stays one until a line is finished."""
    unit.crash_count = 0
    if batch.crash_times:
        batch.crash_times = None


def note_poison(session: Session, batch_id: str, part_id: str) -> None:
    """Put a line that was found to be poison into quarantine, after its error line, which is that part; too many of
    them pause the batch."""
    session.get_one(Part, part_id).is_poison = True
    batch = session.get_one(Batch, batch_id, with_for_update=True, populate_existing=True)
    times = poison.note(batch.poison_times or (), database_now_ms(session), is_incident=False)
    batch.poison_times = times
    if poison.is_too_much(times):
        _pause(batch, f"{len(times)} of its requests each ended an engine process twice")


def pause(session: Session, batch_id: str, reason: str | None) -> Batch:
    """Stop a batch until somebody resumes it: its units are given back and not claimed. Again changes nothing.

    With a reason it is an operator who does, and who alone ends this pause; without one, the batch's own project. Each
    has a pause of its own, and the batch runs on when both have ended.
    """
    batch = _unended(session, batch_id, "paused")
    if reason is None:
        batch.is_paused = batch.is_own_pause = True
    elif batch.pause_reason is None:
        _pause(batch, reason)
    return batch


def resume(session: Session, batch_id: str, *, is_operator: bool = True) -> Batch:
    """End the operator's pause of a batch, with a clean record, or its project's. Again changes nothing."""
    batch = _unended(session, batch_id, "resumed")
    if is_operator:
        batch.pause_reason = None
        batch.crash_times = batch.poison_times = None
    elif batch.pause_reason is not None and not batch.is_own_pause:
        raise PermissionDeniedError(
            f"{batch_id} was paused: {batch.pause_reason}. Only the operator can resume it.", code="paused_by_operator"
        )
    else:
        batch.is_own_pause = False
    batch.is_paused = batch.is_own_pause or batch.pause_reason is not None
    return batch


def _judge(session: Session, batch: Batch, unit: Unit) -> None:
    lacking = ~int.from_bytes(unit.done_bitmap, "little") & ((1 << unit.num_lines) - 1)
    verdict = poison.judge(crash_count=unit.crash_count, is_suspect=unit.is_suspect, num_lacking=lacking.bit_count())
    if verdict is Verdict.WATCH:
        unit.is_suspect, unit.crash_count = True, 0
    elif verdict is Verdict.SPLIT:
        _split(session, batch, unit, lacking)


def _split(session: Session, batch: Batch, unit: Unit, lacking: int) -> None:
    """Leave the first half of the lines to the unit, and give the others to a new one; both are suspects."""
    everything = (1 << unit.num_lines) - 1
    first, second = poison.halves(lacking)
    # what was saved of its sequences may be what ends the engine: both halves begin anew
    unit.resume_key = unit.resume_sha256 = None
    progress_queries.set_running(batch, unit, lines=0, tokens=0)
    last_no = session.scalar(select(func.max(Unit.no)).where(Unit.batch_id == unit.batch_id)) or 0
    other = Unit(
        id=ids.unit_id(),
        batch_id=unit.batch_id,
        project_id=unit.project_id,
        model_digest=unit.model_digest,
        model_id=unit.model_id,
        window_no=unit.window_no,
        no=last_no + 1,
        s3_key=unit.s3_key,
        sha256=unit.sha256,
        num_lines=unit.num_lines,
        est_tokens=unit.est_tokens,
        state="ready",
        epoch=0,
        not_before_ms=unit.not_before_ms,
        attempts=unit.attempts,
        parent_id=unit.id,
        resume_key=unit.resume_key,
        resume_sha256=unit.resume_sha256,
    )
    for half, lines in ((unit, first), (other, second)):
        half.is_suspect, half.crash_count = True, 0
        half.done_bitmap = (everything & ~lines).to_bytes((unit.num_lines + 7) // 8, "little")
        half.num_done = unit.num_lines - lines.bit_count()
    session.add(other)
    session.flush()


def _brake(batch: Batch, now_ms: int) -> None:
    if batch.status not in _RUNNING:
        return
    times = poison.note(batch.crash_times or (), now_ms)
    batch.crash_times = times
    if poison.is_too_much(times):
        _pause(batch, f"engines crashed {len(times)} times in a row while they ran it")


def _pause(batch: Batch, reason: str | None) -> None:
    batch.is_paused, batch.pause_reason = True, reason


def _unended(session: Session, batch_id: str, what: str) -> Batch:
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if batch is None:
        raise NotFoundError(f"There is no batch {batch_id}.", param="batch_id")
    if batch.ended_ms is not None:
        raise InvalidRequestError(f"{batch_id} is {batch.status}: it can't be {what} any more.", param="batch_id")
    return batch
