"""SQL of finalizing: who may, what is to be merged, and the publication by compare-and-set.

`begin` fixes why the batch ends, seals its units and raises `fin_epoch`; from then on no part is added. `publish`
names that epoch: a finalizer that was overtaken changes 0 rows and throws its objects away.

A finalizer that finds a part missing or damaged takes it back by `void_part`, in one transaction:

    the part    counts -> void: counters, usage and posting are taken back by rows of their own
    its unit    done -> ready, epoch + 1, the part's bits cleared; of a cancelled or expired batch -> sealed, so that
                its lines end like all that never ran; without a unit (lines that the planner rejected) its window is
                marked, and the planner rebuilds the part from the input (repair_queries)
    the batch   stays `finalizing`, without a finalizer until nothing is left to run or to rebuild; then the next
                attempt merges what counts. Lines that are run again may take as long as the deadline says, and
                at least `RERUN_MS` from the seal on; what isn't there by then is sealed, and the batch is `expired`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import ColumnElement, SQLColumnExpression

from batchsvc.batches import lifecycle, progress_queries, result_queries, tally_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Part, Segment, Unit, Window
from batchsvc.billing import service as billing
from batchsvc.db.session import database_now_ms
from batchsvc.files import life_queries
from batchsvc.files import service as files

STOP_GRACE_MS = 7_000  # how long a stopped batch waits for its workers: within 10 s from its stop it has ended
RERUN_MS = 3_600_000  # what the lines of damaged parts may take at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalizing:
    """The right to finalize a batch, until the lease ends. `stale`: segments that earlier attempts left."""

    batch_id: str
    project_id: str
    epoch: int
    why: Status
    total: int
    stale: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowToMerge:
    """A window's place in the batch, and where its line numbers and custom_ids are.

    `num_lost`: lines without a result whose stored work was damaged and could not be rebuilt.
    """

    no: int
    num_lines: int
    line_nos_key: str
    line_nos_sha256: str
    num_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartToMerge:
    """A part that counts."""

    id: str
    s3_key: str
    sha256: str
    lines_ok: int
    lines_err: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile:
    """An object that becomes a file; `kind` is output or error."""

    kind: str
    s3_key: str
    etag: str
    sha256: str
    size_bytes: int


def due(session: Session) -> list[str]:
    """Batches that somebody should finalize now."""
    return list(session.scalars(select(Batch.id).where(_is_due(database_now_ms(session))).order_by(Batch.expires_ms)))


def is_due(session: Session, batch_id: str) -> bool:
    """Whether somebody should finalize this batch now."""
    asked = select(Batch.id).where(Batch.id == batch_id, _is_due(database_now_ms(session)))
    return session.scalar(asked) is not None


def next_seal_ms(session: Session) -> int | None:
    """In how many milliseconds time alone will make a batch due, if none of them is left to wait for: None."""
    now = database_now_ms(session)
    waited = now - STOP_GRACE_MS
    cancelled = select(func.min(Batch.cancelling_ms) + STOP_GRACE_MS).where(
        Batch.status == Status.CANCELLING, Batch.cancelling_ms >= waited
    )
    expiring = select(func.min(Batch.expires_ms)).where(Batch.status == Status.IN_PROGRESS, Batch.expires_ms > now)
    expired = select(func.min(Batch.expires_ms) + STOP_GRACE_MS).where(
        Batch.status == Status.IN_PROGRESS, Batch.expires_ms >= waited, Batch.expires_ms <= now
    )
    times = [session.scalar(moment) for moment in (cancelled, expiring, expired)]
    return min((time + 1 - now for time in times if time is not None), default=None)


def begin(session: Session, batch_id: str, owner: str, lease_s: float) -> Finalizing | None:
    """Take the right to finalize: seal the batch if nobody has. None if it isn't due, or somebody else is at it."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    now = database_now_ms(session)
    if batch is None or not is_due(session, batch_id):
        return None
    is_sealed = batch.status == Status.FINALIZING  # by an earlier attempt
    if is_sealed and unit_queries.seal(session, batch_id):
        batch.why = Status.EXPIRED  # lines of damaged parts weren't run again in time
    if not is_sealed:
        sealed = unit_queries.seal(session, batch_id)
        ended = Status.EXPIRED if sealed else Status.COMPLETED
        why = Status.CANCELLED if batch.status == Status.CANCELLING else ended
        lifecycle.move(session, batch_id, Status.FINALIZING, now_ms=now, values={"why": why})
        session.refresh(batch)
    result_queries.number_older(session, batch)
    progress_queries.note_merge(batch, 0)  # whatever didn't run is no work any more
    batch.fin_epoch += 1
    batch.fin_owner, batch.fin_lease_ms = owner, now + round(lease_s * 1000)
    earlier = select(Segment.state).where(Segment.batch_id == batch_id, Segment.fin_epoch < batch.fin_epoch)
    return Finalizing(
        batch_id=batch.id,
        project_id=batch.project_id,
        epoch=batch.fin_epoch,
        why=Status(batch.why or Status.COMPLETED),
        total=batch.total,
        stale=list(session.scalars(earlier)),
    )


def keep(session: Session, batch_id: str, fin_epoch: int, lease_s: float, merged_lines: int = 0) -> bool:
    """Prolong the lease of a finalizer, and note how far it is. False: it was overtaken."""
    batch = _mine(session, batch_id, fin_epoch)
    if batch is None:
        return False
    batch.fin_lease_ms = database_now_ms(session) + round(lease_s * 1000)
    progress_queries.note_merge(batch, merged_lines)
    return True


def give_up(session: Session, batch_id: str, fin_epoch: int) -> None:
    """End the lease of a finalizer that can't go on, so that another need not wait for it."""
    batch = _mine(session, batch_id, fin_epoch)
    if batch is not None:
        batch.fin_lease_ms = 0


def void_part(session: Session, batch_id: str, fin_epoch: int, part_id: str) -> bool:
    """Take back a part whose object is missing or damaged: see above. False: the finalizer was overtaken."""
    batch = _mine(session, batch_id, fin_epoch)
    if batch is None:
        return False
    part = session.get_one(Part, part_id, with_for_update=True, populate_existing=True)
    if part.is_void:
        return True  # the answer to the commit was lost
    take_back(session, batch, part, database_now_ms(session), can_run=batch.why == Status.COMPLETED)
    tally_queries.add(session, "parts_damaged")
    if part.unit_id is None:
        mark_damaged(session, batch_id, part.window_no)
    return True


def take_back(session: Session, batch: Batch, part: Part, now_ms: int, *, can_run: bool) -> Unit | None:
    """Let a part count no more, nor its money; its lines run again, if anything may run. Returns its unit, if it is of
    one. The caller has locked batch and part.
    """
    part.is_void = True
    batch.completed -= part.lines_ok
    batch.failed -= part.lines_err
    batch.input_tokens -= part.input_tokens
    batch.cached_tokens -= part.cached_tokens
    batch.output_tokens -= part.output_tokens
    batch.cost_nanos -= part.cost_nanos
    batch.standard_nanos -= part.standard_nanos
    batch.over_budget -= part.over_budget
    batch.est_done_tokens -= part.est_tokens
    progress_queries.note_work(batch, now_ms)
    if part.unit_id is None:
        return None
    unit = session.get_one(Unit, part.unit_id, with_for_update=True, populate_existing=True)
    unit_queries.reopen(unit, part.bitmap or b"", can_run=can_run)
    billing.post_void(session, batch, part, model_id=unit.model_id)
    return unit


def return_window(session: Session, batch_id: str, fin_epoch: int, window_no: int) -> bool:
    """Have the numbers of a window's lines read again from the input. False: the finalizer was overtaken."""
    if _mine(session, batch_id, fin_epoch) is None:
        return False
    mark_damaged(session, batch_id, window_no)
    return True


def mark_damaged(session: Session, batch_id: str, window_no: int) -> None:
    """Have the planner rebuild what is damaged or missing of a window's plan."""
    session.execute(update(Window).where(Window.batch_id == batch_id, Window.no == window_no).values(is_damaged=True))


def windows(session: Session, batch_id: str) -> list[WindowToMerge]:
    """The windows of a batch in input order."""
    unread = _sum_by_window(session, Unit, Unit.num_lines - Unit.num_done, batch_id, Unit.state == "sealed")
    rejected = _sum_by_window(session, Part, Part.lines_err, batch_id, Part.unit_id.is_(None), ~Part.is_void)
    rows = session.scalars(select(Window).where(Window.batch_id == batch_id).order_by(Window.no))
    return [
        WindowToMerge(
            no=row.no,
            num_lines=row.num_lines,
            line_nos_key=row.line_nos_key,
            line_nos_sha256=row.line_nos_sha256,
            num_lost=unread.get(row.no, 0) + row.num_rejected - rejected.get(row.no, 0),
        )
        for row in rows
    ]


def parts(session: Session, batch_id: str, window_no: int) -> list[PartToMerge]:
    """The parts of a window that count."""
    rows = session.scalars(
        select(Part)
        .where(Part.batch_id == batch_id, Part.window_no == window_no, ~Part.is_void)
        .order_by(Part.created_ms, Part.id)
    )
    return [
        PartToMerge(id=row.id, s3_key=row.s3_key, sha256=row.sha256, lines_ok=row.lines_ok, lines_err=row.lines_err)
        for row in rows
    ]


def save_segment(session: Session, batch_id: str, fin_epoch: int, window_no: int, state: dict[str, Any]) -> None:
    """Note what a finalizer has begun in the store, so that its successor can clear it away."""
    session.merge(Segment(batch_id=batch_id, fin_epoch=fin_epoch, window_no=window_no, state=state))


def publish(
    session: Session,
    batch_id: str,
    fin_epoch: int,
    results: list[ResultFile],
    *,
    completed: int,
    failed: int,
    file_ttl_s: int,
) -> bool:
    """Make the results the batch's own and end it, all at once. False: overtaken, nothing was written."""
    batch = _mine(session, batch_id, fin_epoch)
    if batch is None:
        # a commit whose answer was lost is tried again: then this attempt is the one that ended the batch
        ended = session.get(Batch, batch_id)
        return ended is not None and ended.status in lifecycle.TERMINAL and ended.fin_epoch == fin_epoch
    now = database_now_ms(session)
    life_s = life_queries.output_life_s(session, batch.project_id, batch.output_expires_after_s, file_ttl_s)
    for result in results:
        row = files.add_result(
            session,
            project_id=batch.project_id,
            filename=f"{batch_id}_{result.kind}.jsonl",
            s3_key=result.s3_key,
            etag=result.etag,
            sha256=result.sha256,
            size_bytes=result.size_bytes,
            created_ms=now,
            expires_ms=now + life_s * 1000,
        )
        row.api_key_id = batch.api_key_id
        if result.kind == "output":
            batch.output_file_id = row.id
        else:
            batch.error_file_id = row.id
    values = {"completed": completed, "failed": failed, "fin_owner": None, "fin_lease_ms": 0}
    session.flush()
    moved = lifecycle.move(session, batch_id, Status(batch.why or Status.COMPLETED), now_ms=now, values=values)
    assert moved, "the row is locked and finalizing, so nobody else can have moved it"
    session.execute(delete(Segment).where(Segment.batch_id == batch_id))
    billing.post_release(session, batch)
    return True


def _mine(session: Session, batch_id: str, fin_epoch: int) -> Batch | None:
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    return batch if batch and batch.status == Status.FINALIZING and batch.fin_epoch == fin_epoch else None


def _sum_by_window(
    session: Session,
    table: type[Unit | Part],
    what: SQLColumnExpression[int],
    batch_id: str,
    *which: ColumnElement[bool],
) -> dict[int, int]:
    summed = select(table.window_no, func.sum(what)).where(table.batch_id == batch_id, *which).group_by(table.window_no)
    return {row[0]: int(row[1]) for row in session.execute(summed)}


def _is_due(now_ms: int) -> ColumnElement[bool]:
    """All units done, or stopped and let go of (or not in time), or a finalizer that died or waited for lines."""
    unfinished = exists(select(Unit.id).where(Unit.batch_id == Batch.id, Unit.state.in_(unit_queries.UNFINISHED)))
    leased = exists(select(Unit.id).where(Unit.batch_id == Batch.id, Unit.state == "leased"))
    damaged = exists(select(Window.no).where(Window.batch_id == Batch.id, Window.is_damaged))
    waited = now_ms - STOP_GRACE_MS
    is_late = and_(Batch.expires_ms <= now_ms, Batch.finalizing_ms <= now_ms - RERUN_MS)
    return or_(
        and_(Batch.status == Status.IN_PROGRESS, ~unfinished),
        and_(Batch.status == Status.IN_PROGRESS, Batch.expires_ms <= now_ms, or_(~leased, Batch.expires_ms < waited)),
        and_(Batch.status == Status.CANCELLING, or_(~leased, Batch.cancelling_ms < waited)),
        and_(Batch.status == Status.FINALIZING, Batch.fin_lease_ms < now_ms, ~damaged, or_(~unfinished, is_late)),
    )
