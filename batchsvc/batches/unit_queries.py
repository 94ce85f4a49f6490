"""SQL of units: claim, renew, commit, release, seal, and what the reaper repairs. The fence lives here.

A claim raises a unit's `epoch`; every later write names it and finds `leased` and that epoch, or changes nothing:
0 rows mean that the caller lost the unit and must stop. A lease that ends in any other way than by its owner's
release raises `crash_count`. All times are the database's.

Lock order is batch, then unit, in every transaction that takes both; a claim takes units only and skips locked ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select, update
from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.batches import progress_queries
from batchsvc.batches.tables import Batch, Part, Unit
from batchsvc.billing import service as billing
from batchsvc.db.session import database_now_ms

UNFINISHED = ("pending", "ready", "leased")
# best first: the nearest deadline, then the older batch, then plan order; fairness will stand before these
_RANK = (Batch.expires_ms, Batch.created_ms, Batch.id, Unit.no)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedUnit:
    """A unit that its claimer owns until the lease ends, with what a worker needs of its batch."""

    id: str
    epoch: int
    batch_id: str
    window_no: int
    no: int
    s3_key: str
    sha256: str
    num_lines: int
    done_bitmap: bytes
    salt: str
    model_id: str
    created_s: int
    rates: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewedUnit:
    """A unit whose lease was prolonged. `is_stopping`: its batch was cancelled or its time is over."""

    id: str
    epoch: int
    is_stopping: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPart:
    """A part that was stored and wants to count. `bitmap` marks its lines as in the unit's done bitmap."""

    id: str
    s3_key: str
    sha256: str
    size_bytes: int
    bitmap: bytes
    lines_ok: int
    lines_err: int
    est_tokens: int = 0
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int
    standard_nanos: int


def claim(session: Session, model_digest: str, owner: str, lease_s: float, limit: int) -> list[ClaimedUnit]:
    """Lease at most `limit` of the best-ranked claimable units of a model to `owner`, in rank order."""
    now = database_now_ms(session)
    picked = (
        select(Unit.id)
        .join(Batch, Batch.id == Unit.batch_id)
        .where(Unit.model_digest == model_digest, *_claimable(now))
        .order_by(*_RANK)
        .limit(limit)
        .with_for_update(skip_locked=True, of=Unit)
        .cte("picked")
    )
    leased = session.execute(
        update(Unit)
        .where(Unit.id.in_(select(picked.c.id)))
        .values(state="leased", epoch=Unit.epoch + 1, owner=owner, lease_ms=now + _ms(lease_s))
        .returning(Unit.id, Unit.epoch, Unit.done_bitmap)
        .execution_options(synchronize_session=False)
    ).all()
    if not leased:
        return []
    fence = {row.id: row for row in leased}
    rows = session.execute(
        select(Unit, Batch)
        .join(Batch, Batch.id == Unit.batch_id)
        .where(Unit.id.in_(fence))
        .order_by(*_RANK)
        .execution_options(populate_existing=True)
    ).all()
    salts = accounts.salts(session, {unit.project_id for unit, _ in rows})
    return [
        ClaimedUnit(
            id=unit.id,
            epoch=fence[unit.id].epoch,
            batch_id=batch.id,
            window_no=unit.window_no,
            no=unit.no,
            s3_key=unit.s3_key,
            sha256=unit.sha256,
            num_lines=unit.num_lines,
            done_bitmap=fence[unit.id].done_bitmap,
            salt=salts[unit.project_id],
            model_id=batch.model_id or "",
            created_s=batch.created_ms // 1000,
            rates=batch.rates or {},
        )
        for unit, batch in rows
    ]


def renew(session: Session, owner: str, lease_s: float) -> list[RenewedUnit]:
    """Prolong every lease of `owner`. A unit that is missing from the answer is lost."""
    now = database_now_ms(session)
    renewed = session.execute(
        update(Unit)
        .where(Unit.owner == owner, Unit.state == "leased")
        .values(lease_ms=now + _ms(lease_s))
        .returning(Unit.id, Unit.epoch, Unit.batch_id)
        .execution_options(synchronize_session=False)
    ).all()
    stopping = set(
        session.scalars(
            select(Batch.id).where(
                Batch.id.in_({row.batch_id for row in renewed}),
                ~is_running(now),
            )
        )
    )
    return [RenewedUnit(id=row.id, epoch=row.epoch, is_stopping=row.batch_id in stopping) for row in renewed]


def commit_part(session: Session, unit_id: str, epoch: int, part: NewPart) -> bool:
    """Make a part count: row, bitmap, counters and money at once. False: the unit is lost, nothing was written.

    Repeating a commit whose answer was lost changes nothing and is True. A part that repeats a line which already
    counts is refused with a ValueError: the fence has made that impossible, so it is a defect of ours.
    """
    if session.get(Part, part.id) is not None:
        return True
    batch_id = session.scalar(select(Unit.batch_id).where(Unit.id == unit_id))
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True) if batch_id else None
    unit = session.get(Unit, unit_id, with_for_update=True, populate_existing=True)
    if batch is None or unit is None or unit.state != "leased" or unit.epoch != epoch:
        return False
    done, new = int.from_bytes(unit.done_bitmap, "little"), int.from_bytes(part.bitmap, "little")
    lines = part.lines_ok + part.lines_err
    if done & new or new.bit_count() != lines or new >> unit.num_lines:
        raise ValueError(f"The part {part.id} doesn't fit the lines that unit {unit_id} still lacks.")
    row = Part(
        id=part.id,
        batch_id=batch.id,
        unit_id=unit.id,
        window_no=unit.window_no,
        epoch=epoch,
        s3_key=part.s3_key,
        sha256=part.sha256,
        size_bytes=part.size_bytes,
        bitmap=part.bitmap,
        lines_ok=part.lines_ok,
        lines_err=part.lines_err,
        est_tokens=part.est_tokens,
        input_tokens=part.input_tokens,
        cached_tokens=part.cached_tokens,
        output_tokens=part.output_tokens,
        cost_nanos=part.cost_nanos,
        standard_nanos=part.standard_nanos,
        created_ms=database_now_ms(session),
    )
    session.add(row)
    unit.done_bitmap = (done | new).to_bytes((unit.num_lines + 7) // 8, "little")
    unit.num_done += lines
    if unit.num_done == unit.num_lines:
        unit.state, unit.owner = "done", None
    batch.completed += part.lines_ok
    batch.failed += part.lines_err
    batch.input_tokens += part.input_tokens
    batch.cached_tokens += part.cached_tokens
    batch.output_tokens += part.output_tokens
    batch.cost_nanos += part.cost_nanos
    batch.standard_nanos += part.standard_nanos
    batch.est_done_tokens += part.est_tokens
    progress_queries.note_work(batch, row.created_ms)
    session.flush()
    billing.post_part(session, batch, row)
    return True


def release(session: Session, unit_id: str, epoch: int, *, crashed: bool = False, delay_s: float = 0) -> bool:
    """Give a leased unit back, claimable after `delay_s`. False: it was lost before.

    `crashed`: the engine died with it.
    """
    mine = and_(Unit.id == unit_id, Unit.epoch == epoch)
    return _give_back(session, mine, crashed=crashed, delay_s=delay_s, skip_locked=False) > 0


def free_owner(session: Session, host: str, pid: int) -> int:
    """Free the units of a process that is known to be dead, without waiting for its leases. Returns how many."""
    return _give_back(session, Unit.owner.startswith(f"{host}:{pid}:", autoescape=True), crashed=True)


def free_expired(session: Session) -> int:
    """Free the units whose lease is over. Returns how many."""
    return _give_back(session, Unit.lease_ms < database_now_ms(session), crashed=True)


def reopen(unit: Unit, bitmap: bytes, *, can_run: bool) -> None:
    """Take back lines that counted: the unit is claimable again, or sealed if nothing may run any more. Its holder,
    if it has one, loses it. The caller has locked batch and unit.
    """
    done, lost = int.from_bytes(unit.done_bitmap, "little"), int.from_bytes(bitmap, "little")
    unit.done_bitmap = (done & ~lost).to_bytes(len(unit.done_bitmap), "little")
    unit.num_done -= (done & lost).bit_count()
    unit.epoch += 1
    if unit.state in ("done", "ready", "leased"):
        unit.state = "ready" if can_run else "sealed"
    unit.owner, unit.lease_ms, unit.not_before_ms, unit.ticket_ms = None, 0, 0, 0


def seal(session: Session, batch_id: str) -> int:
    """End all unfinished units of a batch: whoever holds one can't commit any more. Returns how many."""
    sealed = session.execute(
        update(Unit)
        .where(Unit.batch_id == batch_id, Unit.state.in_(UNFINISHED))
        .values(state="sealed", epoch=Unit.epoch + 1, owner=None)
        .returning(Unit.id)
        .execution_options(synchronize_session=False)
    ).all()
    return len(sealed)


def delayed_batches(session: Session, digests: Iterable[str]) -> set[str]:
    """Batches of these models that have units which were given back for later. Served by ix_units_claim."""
    later = (Unit.state == "ready", Unit.not_before_ms > database_now_ms(session))
    return set(session.scalars(select(Unit.batch_id).where(Unit.model_digest.in_(set(digests)), *later).distinct()))


def take_first_tickets(session: Session, batch_id: str) -> dict[str, int]:
    """How many tickets to send for a batch that was just planned, by model; later ones are the reaper's."""
    marked = session.execute(
        update(Unit)
        .where(Unit.batch_id == batch_id, Unit.state == "ready", Unit.ticket_ms == 0)
        .values(ticket_ms=database_now_ms(session))
        .returning(Unit.model_digest)
        .execution_options(synchronize_session=False)
    )
    return dict(Counter(marked.scalars()))


def claimable_by_model(session: Session) -> dict[str, int]:
    """Units that could be claimed now, by the digest of their model: the length that its queue should have."""
    counted = (
        select(Unit.model_digest, func.count(Unit.id))
        .join(Batch, Batch.id == Unit.batch_id)
        .where(*_claimable(database_now_ms(session)))
        .group_by(Unit.model_digest)
    )
    return {row[0]: row[1] for row in session.execute(counted)}


def take_tickets_due(session: Session, model_digest: str, limit: int, quiet_s: float) -> int:
    """How many of `limit` missing tickets to send now.

    A unit that had one in the last `quiet_s` seconds gets none, so that several reapers don't send the same twice.
    """
    now = database_now_ms(session)
    picked = (
        select(Unit.id)
        .join(Batch, Batch.id == Unit.batch_id)
        .where(Unit.model_digest == model_digest, Unit.ticket_ms <= now - _ms(quiet_s), *_claimable(now))
        .limit(limit)
        .with_for_update(skip_locked=True, of=Unit)
        .cte("picked")
    )
    marked = session.execute(
        update(Unit)
        .where(Unit.id.in_(select(picked.c.id)))
        .values(ticket_ms=now)
        .returning(Unit.id)
        .execution_options(synchronize_session=False)
    ).all()
    return len(marked)


def is_running(now_ms: int) -> ColumnElement[bool]:
    """What lets the units of a batch run: in progress and in time, or being finalized while lines of damaged parts
    are run again, which no deadline of the batch cuts."""
    return or_(
        and_(Batch.status == "in_progress", Batch.expires_ms > now_ms),
        and_(Batch.status == "finalizing", Batch.why == "completed"),
    )


def _claimable(now_ms: int) -> tuple[ColumnElement[bool], ...]:
    """What makes a unit claimable, as conditions on a unit joined with its batch."""
    return (
        Unit.state == "ready",
        Unit.not_before_ms <= now_ms,
        is_running(now_ms),
    )


def _give_back(
    session: Session, which: ColumnElement[bool], *, crashed: bool, delay_s: float = 0, skip_locked: bool = True
) -> int:
    # to a reaper, a unit that is locked is just being committed or renewed: its owner lives
    picked = select(Unit.id).where(Unit.state == "leased", which).with_for_update(skip_locked=skip_locked).cte("picked")
    freed = session.execute(
        update(Unit)
        .where(Unit.id.in_(select(picked.c.id)))
        .values(
            state="ready",
            owner=None,
            ticket_ms=0,
            not_before_ms=database_now_ms(session) + _ms(delay_s),
            crash_count=Unit.crash_count + int(crashed),
        )
        .returning(Unit.id)
        .execution_options(synchronize_session=False)
    ).all()
    return len(freed)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
