"""SQL of units: claim, renew, commit, release, seal, and what the reaper repairs. The fence lives here.

A claim raises a unit's `epoch`; every later write names it and finds `leased` and that epoch, or changes nothing:
0 rows mean that the caller lost the unit and must stop. A lease that ends in any other way than by its owner's
release raises `crash_count`. All times are the database's.

Lock order is batch, then unit, then share, in every transaction that takes several; a claim takes units first, but
skips locked ones. Who is served next is for claim_queries.py, what a crash means for poison_queries.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, bindparam, case, func, or_, select, update
from sqlalchemy.orm import Session

from batchsvc.accounts.tables import Project
from batchsvc.batches import (
    budget_queries,
    claim_queries,
    hold_queries,
    model_pins,
    poison_queries,
    progress_queries,
    result_queries,
    retry,
)
from batchsvc.batches.claim_queries import LeasedUnit
from batchsvc.batches.tables import Batch, Part, Unit
from batchsvc.billing import service as billing
from batchsvc.db.session import database_now_ms

UNFINISHED = ("pending", "ready", "leased")


class Claim(NamedTuple):
    """A unit under one epoch: what is lost or over is this claim of it, never a later one by the same owner."""

    unit_id: str
    epoch: int


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
    is_suspect: bool = False  # it runs alone, and its lines should count as soon as they are finished
    attempts: Mapping[int, int] = field(default_factory=dict)  # failed attempts of lines, by their bit
    salt: str
    model_id: str
    created_s: int
    rates: dict[str, Any]
    is_metered: bool = False  # its lines cost money that has to be granted first
    resume_key: str | None = None  # object with sequences that an earlier owner left unfinished, and its sha256
    resume_sha256: str | None = None

    @property
    def claim(self) -> Claim:
        return Claim(self.id, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewedUnit:
    """A unit whose lease was prolonged. `is_stopping`: its batch was cancelled, is paused, or its time is over."""

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
    line_nos: bytes | None = None  # of the same lines: see line_set.py
    lines_ok: int
    lines_err: int
    num_answers: int | None = None  # of the lines that are ok; None: one each
    est_tokens: int = 0
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int
    standard_nanos: int
    over_budget: int = 0  # of its error lines, those that there was no money for


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedLines:
    """What becomes of lines that failed: these may run again after `delay_s`, those end as error lines."""

    again: frozenset[int]
    failed: frozenset[int]
    delay_s: float


class Backlog(NamedTuple):
    """Work of a model: units that could be claimed now, and predicted tokens of these and of the leased ones."""

    claimable: int
    tokens: int


def claim(
    session: Session, model_digest: str, owner: str, lease_s: float, limit: int, *, is_night: bool = True
) -> list[ClaimedUnit]:
    """Lease at most `limit` of the best-ranked claimable units of a model to `owner`, in rank order."""
    best = claim_queries.lease_best(session, model_digest, owner, lease_s, limit, is_night=is_night)
    return _claimed(session, best)


def claim_poison(session: Session, owner: str, lease_s: float, limit: int) -> list[ClaimedUnit]:
    """Lease units whose last line is poison to `owner`, who writes its error line."""
    now = database_now_ms(session)
    return _claimed(session, claim_queries.lease_poison(session, owner, now, now + _ms(lease_s), limit))


def _claimed(session: Session, leased: Sequence[LeasedUnit]) -> list[ClaimedUnit]:
    if not leased:
        return []
    rows = session.connection().execute(_claimed_statement(), {"p_ids": [unit.id for unit in leased]})
    found = {row.id: row for row in rows}
    pins = {row.id: model_pins.pin_of(row, row.unit_model_id) for row in found.values()}
    return [
        ClaimedUnit(
            id=row.id,
            epoch=row.epoch,
            batch_id=row.batch_id,
            window_no=row.window_no,
            no=row.no,
            s3_key=row.s3_key,
            sha256=row.sha256,
            num_lines=row.num_lines,
            done_bitmap=row.done_bitmap,
            is_suspect=row.is_suspect,
            attempts={int(bit): failed for bit, failed in (row.attempts or {}).items()},
            salt=row.salt,
            model_id=pin.id if (pin := pins[row.id]) else "",
            created_s=row.created_ms // 1000,
            rates=dict(pin.rates) if pin else {},
            is_metered=row.is_prepaid or row.budget_nanos is not None or row.max_cost_nanos is not None,
            resume_key=row.resume_key,
            resume_sha256=row.resume_sha256,
        )
        for row in (found[unit.id] for unit in leased)
    ]


@cache
def _claimed_statement() -> Select[*tuple[Any, ...]]:
    unit = (Unit.id, Unit.epoch, Unit.batch_id, Unit.window_no, Unit.no, Unit.s3_key, Unit.sha256, Unit.num_lines)
    state = (Unit.done_bitmap, Unit.is_suspect, Unit.attempts, Unit.resume_key, Unit.resume_sha256)
    return (
        select(*unit, *state, Unit.model_id.label("unit_model_id"), Batch.created_ms, Project.salt)
        .add_columns(Batch.model_id, Batch.model_digest, Batch.rates, Batch.models)
        .add_columns(Batch.max_cost_nanos, Project.budget_nanos, Project.is_prepaid)
        .join(Batch, Batch.id == Unit.batch_id)
        .join(Project, Project.id == Unit.project_id)
        .where(Unit.id.in_(bindparam("p_ids", expanding=True)))
    )


def renew(session: Session, owner: str, lease_s: float, unit_ids: Collection[str]) -> list[RenewedUnit]:
    """Prolong these leases of `owner`. A unit that is missing from the answer is lost.

    A unit that `owner` doesn't know of, because the answer to its claim was lost, isn't prolonged: its lease runs out.
    """
    now = database_now_ms(session)
    renewed = session.execute(
        update(Unit)
        .where(Unit.owner == owner, Unit.state == "leased", Unit.id.in_(unit_ids))
        .values(lease_ms=now + _ms(lease_s))
        .returning(Unit.id, Unit.epoch)
        .execution_options(synchronize_session=False)
    ).all()
    ending = set(stopping(session, owner))
    return [RenewedUnit(id=row.id, epoch=row.epoch, is_stopping=row.id in ending) for row in renewed]


def stopping(session: Session, owner: str) -> list[str]:
    """Units that `owner` has to let go of: a look between two renewals, which writes nothing. Served by
    ix_units_lease.

    Among them those whose project has got a limit since they were claimed: who claims them next asks for money, and
    goes on with the answers that they have begun.
    """
    mine = (Unit.owner == owner, Unit.state == "leased")
    ended = ~claim_queries.is_running(database_now_ms(session)) | Batch.is_paused
    is_limited = Project.is_prepaid | Project.budget_nanos.is_not(None)
    found = select(Unit.id).join(Batch, Batch.id == Unit.batch_id).join(Project, Project.id == Unit.project_id)
    return list(session.scalars(found.where(*mine, ended | (is_limited & Unit.is_metered.is_(False)))))


def commit_part(session: Session, unit_id: str, epoch: int, part: NewPart) -> bool:
    """Make a part count: row, bitmap, counters and money at once. False: the unit is lost, nothing was written.

    Repeating a commit whose answer was lost changes nothing and is True. A part that repeats a line which already
    counts is refused with a ValueError: the fence has made that impossible, so it is a defect of ours.
    """
    batch_id = session.scalar(select(Unit.batch_id).where(Unit.id == unit_id))
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True) if batch_id else None
    if session.get(Part, part.id) is not None:  # asked under the lock: the lost answer may still be on its way
        return True
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
        seq=result_queries.next_seq(batch),
        line_nos=part.line_nos,
        lines_ok=part.lines_ok,
        lines_err=part.lines_err,
        num_answers=part.num_answers,
        est_tokens=part.est_tokens,
        input_tokens=part.input_tokens,
        cached_tokens=part.cached_tokens,
        output_tokens=part.output_tokens,
        cost_nanos=part.cost_nanos,
        standard_nanos=part.standard_nanos,
        over_budget=part.over_budget,
        created_ms=database_now_ms(session),
    )
    session.add(row)
    unit.done_bitmap = (done | new).to_bytes((unit.num_lines + 7) // 8, "little")
    unit.num_done += lines
    if unit.num_done == unit.num_lines:
        unit.state, unit.owner = "done", None
        unit.resume_key = unit.resume_sha256 = None
    batch.completed += part.lines_ok
    batch.failed += part.lines_err
    batch.input_tokens += part.input_tokens
    batch.cached_tokens += part.cached_tokens
    batch.output_tokens += part.output_tokens
    batch.cost_nanos += part.cost_nanos
    batch.standard_nanos += part.standard_nanos
    batch.over_budget += part.over_budget
    unit.spent_nanos += part.cost_nanos
    progress_queries.note_part(batch, unit, row)
    poison_queries.note_progress(batch, unit)
    budget_queries.cover(session, batch)
    session.flush()
    billing.post_part(session, batch, row, model_id=unit.model_id)
    ran = part.input_tokens - part.cached_tokens + part.output_tokens
    claim_queries.charge(session, batch.project_id, unit.model_digest, ran)
    return True


def release(session: Session, unit_id: str, epoch: int, *, crashed: bool = False, delay_s: float = 0) -> bool:
    """Give a leased unit back, claimable after `delay_s`. False: it was lost before.

    `crashed`: the engine died with it.
    """
    mine = (Unit.id == unit_id, Unit.epoch == epoch)
    if crashed:
        return poison_queries.end_leases(session, and_(*mine), delay_s=delay_s, skip_locked=False) > 0
    not_before = database_now_ms(session) + _ms(delay_s)
    freed = session.execute(
        update(Unit)
        .where(Unit.state == "leased", *mine)
        .values(state="ready", owner=None, ticket_ms=0, not_before_ms=not_before)
        .returning(Unit.id)
        .execution_options(synchronize_session=False)
    ).all()
    return bool(freed)


def release_all(session: Session, owner: str, *, crashed: bool = False) -> int:
    """Give back whatever `owner` still holds, claimable now, in one statement. Returns how many units."""
    mine = (Unit.owner == owner, Unit.state == "leased")
    if crashed:
        return poison_queries.end_leases(session, and_(*mine), skip_locked=False)
    freed = session.execute(
        update(Unit)
        .where(*mine)
        .values(state="ready", owner=None, ticket_ms=0, not_before_ms=database_now_ms(session))
        .returning(Unit.id)
        .execution_options(synchronize_session=False)
    ).all()
    return len(freed)


def return_lines(session: Session, unit_id: str, epoch: int, failures: Mapping[int, int]) -> ReturnedLines | None:
    """Settle what becomes of lines that failed for a reason of the engine. None: the unit is lost.

    `failures` are attempts that each line, named by its bit, has failed so far, this one included; saying the same
    again changes nothing. Lines that may run again stay undone: the owner releases the unit with the delay when its
    other lines are finished. The others are for the owner to end as error lines, in a part.
    """
    batch_id = session.scalar(select(Unit.batch_id).where(Unit.id == unit_id))
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True) if batch_id else None
    unit = session.get(Unit, unit_id, with_for_update=True, populate_existing=True)
    if batch is None or unit is None or unit.state != "leased" or unit.epoch != epoch:
        return None
    known = {int(bit): failed for bit, failed in (unit.attempts or {}).items()}
    settled = {bit for bit, failed in failures.items() if known.get(bit, 0) >= failed}
    fresh = {bit: failed for bit, failed in failures.items() if bit not in settled}
    verdict = retry.judge(fresh, retry.budget(batch.total) - batch.num_retries)
    batch.num_retries += len(verdict.again)
    # a line that may not run again is remembered as one that has used up its attempts
    known |= {bit: failures[bit] for bit in verdict.again} | dict.fromkeys(verdict.failed, retry.MOST_ATTEMPTS)
    unit.attempts = {str(bit): failed for bit, failed in known.items()}
    again = verdict.again | {bit for bit in settled if known[bit] < retry.MOST_ATTEMPTS}
    wait_s = max((retry.delay_s(known[bit], random.random()) for bit in again), default=0.0)  # noqa: S311  jitter
    return ReturnedLines(again=frozenset(again), failed=frozenset(failures) - again, delay_s=wait_s)


def free_owner(session: Session, host: str, pid: int) -> int:
    """Free the units of a process that is known to be dead, without waiting for its leases. Returns how many."""
    return poison_queries.end_leases(session, Unit.owner.startswith(f"{host}:{pid}:", autoescape=True))


def free_expired(session: Session) -> int:
    """Free the units whose lease is over. Returns how many."""
    return poison_queries.end_leases(session, Unit.lease_ms < database_now_ms(session))


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


def open_models(session: Session, batch_id: str) -> dict[str, str]:
    """The models of the unfinished units of a batch whose lines name theirs, with their digests."""
    found = select(Unit.model_id, Unit.model_digest).where(Unit.batch_id == batch_id, Unit.state.in_(UNFINISHED))
    return {row.model_id or "": row.model_digest for row in session.execute(found.distinct())}


def take_first_tickets(session: Session, batch_id: str, *, is_night: bool = True) -> dict[str, int]:
    """How many tickets to send for a batch that was just planned, by model; later ones are the reaper's."""
    now = database_now_ms(session)
    first = (Unit.batch_id == batch_id, Unit.ticket_ms == 0)
    units = select(Unit.id).join(Batch, Batch.id == Unit.batch_id)
    picked = units.where(*first, *claim_queries.claimable(now, is_night=is_night))
    marked = session.execute(
        update(Unit)
        .where(Unit.id.in_(picked))
        .values(ticket_ms=now)
        .returning(Unit.model_digest)
        .execution_options(synchronize_session=False)
    )
    return dict(Counter(marked.scalars()))


def scaling(session: Session, is_night: bool) -> dict[str, Backlog]:
    """What workers are wanted for, by the digest of the model: nothing for what is paused, held, or not yet due."""
    now = database_now_ms(session)
    claimable = and_(*claim_queries.claimable(now, is_night=is_night))
    leased = and_(Unit.state == "leased", claim_queries.is_running(now), Batch.is_paused.is_(False))
    is_held = hold_queries.is_model_held(Unit.model_digest.expression)
    counted = (
        select(
            Unit.model_digest,
            func.sum(case((Unit.state == "ready", 1), else_=0)),
            func.sum(claim_queries.remaining_tokens()),
        )
        .join(Batch, Batch.id == Unit.batch_id)
        .where(Unit.state.in_(("ready", "leased")), or_(and_(claimable, ~is_held), leased))
        .group_by(Unit.model_digest)
    )
    return {row[0]: Backlog(int(row[1]), int(row[2])) for row in session.execute(counted)}


def take_tickets_due(session: Session, model_digest: str, limit: int, quiet_s: float, *, is_night: bool = True) -> int:
    """How many of `limit` missing tickets to send now.

    A unit that had one in the last `quiet_s` seconds gets none, so that several reapers don't send the same twice.
    """
    now = database_now_ms(session)
    due = (Unit.model_digest == model_digest, Unit.ticket_ms <= now - _ms(quiet_s))
    picked = (
        select(Unit.id)
        .join(Batch, Batch.id == Unit.batch_id)
        .where(*due, *claim_queries.claimable(now, is_night=is_night))
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


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
