"""SQL of claims: which units are claimable, who is served next, and what a project is charged for it.

claim_rank.py decides; here are the rows that it decides over, and the lock on what it chose. A claim locks units only
(and skips locked ones), then the model's clock, then its project's share; a part's commit locks its project's share
last of all. So no two of them wait for each other in a circle.

Suspect units (poison.py) run alone: one engine of a model holds one of them and nothing else. Which engine that is
needs no agreement: the first by id of those that were heard of lately. It takes no other work while there are suspects,
so it becomes empty, takes one, and whatever happens next has one cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    CompoundSelect,
    Integer,
    Select,
    SQLColumnExpression,
    String,
    and_,
    bindparam,
    cast,
    exists,
    func,
    literal_column,
    null,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningUpdate

from batchsvc.accounts.tables import Project
from batchsvc.batches import claim_rank, hold_queries, poison
from batchsvc.batches.claim_rank import Candidate, Holding
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Share, Unit, Worker
from batchsvc.db.base import BigInt
from batchsvc.db.insert import insert
from batchsvc.db.session import database_now_sql

Conditions = tuple[SQLColumnExpression[bool], ...]
Moment = int | BindParameter[int]
Kind = Literal["ranked", "suspect", "poison"]

# statements of every claim are made once: making one takes longer than running it
_NOW, _DIGEST = bindparam("p_now", type_=BigInt), bindparam("p_digest", type_=String)
_CLOCK = ""  # project_id of the model's clock
_SILENT_SHARE = 3  # of a lease: suspects don't wait for an engine that was silent for a third, about two heartbeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimer:
    """Who claims units of which model, until when."""

    model_digest: str
    owner: str
    now_ms: int
    lease_ms: int
    is_night: bool


@dataclass(frozen=True, slots=True)
class LeasedUnit:
    """A unit that was just leased, and the tokens that it still has to do."""

    id: str
    epoch: int
    tokens: int


def claimable(now_ms: Moment, *, is_night: bool) -> Conditions:
    """What makes a unit claimable, as conditions on a unit joined with its batch."""
    return (*_is_ready(now_ms), *_may_run(now_ms, is_night=is_night))


def is_running(now_ms: Moment) -> ColumnElement[bool]:
    """What lets the units of a batch run: in progress and in time, or being finalized while lines of damaged parts
    are run again, which no deadline of the batch cuts."""
    return or_(
        and_(Batch.status == Status.IN_PROGRESS, Batch.expires_ms > now_ms),
        and_(Batch.status == Status.FINALIZING, Batch.why == Status.COMPLETED),
    )


def lease_poison(session: Session, owner: str, now_ms: int, lease_ms: int, limit: int) -> list[LeasedUnit]:
    """Lease units of which only an error line can be made, for who writes it. Served by ix_units_suspect."""
    claimer = Claimer(model_digest="", owner=owner, now_ms=now_ms, lease_ms=lease_ms, is_night=True)
    return _lease(session, claimer, "poison", limit)


def remaining_tokens() -> ColumnElement[int]:
    """Predicted work that a unit still has, as an expression; a line counts as one token at least."""
    lacking = Unit.num_lines - Unit.num_done
    return Unit.est_tokens * lacking // Unit.num_lines + lacking


def lease_best(
    session: Session, model_digest: str, owner: str, lease_s: float, limit: int, *, is_night: bool
) -> list[LeasedUnit]:
    """Lease at most `limit` units of a model, the best-ranked ones, in rank order."""
    looked = _look_statement(database_now_sql(session))
    asked = {"p_digest": model_digest, "p_owner": owner}
    now_ms, has_suspects, clock, is_held = session.connection().execute(looked, asked).one()
    if is_held:
        return []
    claimer = Claimer(
        model_digest=model_digest,
        owner=owner,
        now_ms=now_ms,
        lease_ms=now_ms + round(lease_s * 1000),
        is_night=is_night,
    )
    leased = _lease_suspect(session, claimer) if has_suspects else None
    return _lease_by_rank(session, claimer, limit, clock) if leased is None else leased


def charge(session: Session, project_id: str, model_digest: str, tokens: int) -> None:
    """Add what was run for a project to its share of a model, in the transaction that makes it count."""
    weight = select(func.coalesce(func.max(Project.weight), 1)).where(Project.id == project_id).scalar_subquery()
    added = tokens * claim_rank.VTIME_PER_TOKEN // weight
    mine = (Share.model_digest == model_digest, Share.project_id == project_id)
    charged = session.execute(
        update(Share)
        .where(*mine)
        .values(vtime=Share.vtime + added)
        .returning(Share.vtime)
        .execution_options(synchronize_session=False)
    ).all()
    if not charged:  # claimed before there were shares
        _add_share(session, model_digest, project_id, 0)
        session.execute(update(Share).where(*mine).values(vtime=Share.vtime + added))


def _is_ready(now_ms: Moment) -> Conditions:
    # "+ 0": a database without statistics would take ix_units_claim for it, and walk all ready units of the model.
    # The last condition leaves out what is poison: the reaper writes its error line.
    return (Unit.state == "ready", Unit.not_before_ms + 0 <= now_ms, Unit.crash_count < poison.CRASHES)


def _is_of(digest: BindParameter[str]) -> ColumnElement[bool]:
    """Whether a unit is of this model. As an expression, so that no database takes ix_units_claim for it."""
    return func.coalesce(Unit.model_digest, "") == digest


def _may_run(now_ms: Moment, *, is_night: bool) -> Conditions:
    """Conditions on a batch: it runs, nobody paused it, it has quota and money, and it is its time of day."""
    conditions: Conditions = (is_running(now_ms), Batch.is_paused.is_(False), Batch.has_quota, Batch.has_budget)
    if is_night:
        return conditions
    # a batch that is late, or already merges, doesn't wait for the night
    needs_day = or_(Batch.latest_start_ms <= now_ms, Batch.status == Status.FINALIZING)
    return (*conditions, or_(Batch.is_offpeak.is_(False), needs_day))


# ---- the order


def _lease_by_rank(session: Session, claimer: Claimer, limit: int, clock_before: int | None) -> list[LeasedUnit]:
    candidates, holdings = _market(session, claimer)
    if not candidates:
        return []
    before = clock_before or 0
    if clock_before is None:
        _add_share(session, claimer.model_digest, _CLOCK, 0)
    held = {holding.project_id: holding.tokens for holding in holdings}
    active = [batch.vtime for batch in candidates] + [holding.vtime for holding in holdings]
    clock = claim_rank.clock_after(before, active)
    late = claim_rank.late(candidates, claimer.now_ms) if len(candidates) > 1 else []
    is_contested = len({batch.project_id for batch in candidates}) > 1
    leased: list[LeasedUnit] = []
    gone: set[str] = set()
    while len(leased) < limit and len(gone) < len(candidates):
        ranked = claim_rank.by_rank(candidates, held, clock)
        if late and _take_panic_credit(session, claimer.model_digest):
            ranked = late + ranked
        batch = next(batch for batch in ranked if batch.batch_id not in gone)
        # a unit that is taken changes the order, if there is more than one project
        most = 1 if is_contested or late else limit - len(leased)
        got = _lease(session, claimer, "ranked", most, p_batch=batch.batch_id, p_digest=claimer.model_digest)
        if len(got) < most:
            gone.add(batch.batch_id)
        leased += got
        held[batch.project_id] = held.get(batch.project_id, 0) + sum(unit.tokens for unit in got)
    _advance(session, claimer.model_digest, candidates, before, clock)
    return leased


def _market(session: Session, claimer: Claimer) -> tuple[list[Candidate], list[Holding]]:
    """Batches that have claimable units, and what the projects hold at this moment."""
    asked = {"p_now": claimer.now_ms, "p_digest": claimer.model_digest}
    candidates, holdings = [], []
    for row in session.connection().execute(_market_statement(claimer.is_night), asked):
        if row.batch_id is None:
            holdings.append(Holding(project_id=row.project_id, vtime=int(row.vtime), tokens=int(row.tokens)))
            continue
        candidates.append(
            Candidate(
                batch_id=row.batch_id,
                project_id=row.project_id,
                weight=row.weight,
                vtime=int(row.vtime),
                priority=row.priority,
                expires_ms=row.expires_ms,
                created_ms=row.created_ms,
                latest_start_ms=row.latest_start_ms,
            )
        )
    return candidates, holdings


@cache
def _market_statement(is_night: bool) -> CompoundSelect[*tuple[Any, ...]]:
    """Served by ix_units_ready, once a batch, and by ix_units_lease. A row without a batch is what a project holds."""
    first_ready = (
        select(Unit.no)
        .where(Unit.batch_id == Batch.id, _is_of(_DIGEST), Unit.is_suspect.is_(False), *_is_ready(_NOW))
        .limit(1)
        .scalar_subquery()  # unlike EXISTS it is never turned into a join over all units
    )
    times = (Batch.expires_ms, Batch.created_ms, Batch.latest_start_ms)
    vtime = func.coalesce(Share.vtime, 0).label("vtime")
    candidates = (
        select(Batch.id.label("batch_id"), Batch.project_id, vtime, Project.weight, Batch.priority, *times)
        .add_columns(literal_column("0", BigInt).label("tokens"))
        .join(Project, Project.id == Batch.project_id)
        .outerjoin(Share, and_(Share.project_id == Batch.project_id, Share.model_digest == _DIGEST))
        .where(
            Batch.status.in_((Status.IN_PROGRESS, Status.FINALIZING)),
            or_(Batch.model_digest == _DIGEST, Batch.model_digest.is_(None)),  # of several models, if of none
            *_may_run(_NOW, is_night=is_night),
            first_ready.is_not(None),
        )
    )
    nothing = [cast(null(), Integer)] * 2 + [cast(null(), BigInt)] * 3
    holdings = (
        select(cast(null(), String), Unit.project_id, func.coalesce(func.max(Share.vtime), 0), *nothing)
        .add_columns(cast(func.sum(remaining_tokens()), BigInt))
        .outerjoin(Share, and_(Share.project_id == Unit.project_id, Share.model_digest == Unit.model_digest))
        .where(Unit.state == "leased", Unit.model_digest == _DIGEST)
        .group_by(Unit.project_id)
    )
    return union_all(candidates, holdings)


def _take_panic_credit(session: Session, model_digest: str) -> bool:
    """Whether the panic lane may make this claim; counts it, or saves for the next one."""
    clock = update(Share).where(Share.model_digest == model_digest, Share.project_id == _CLOCK)
    price, saved = claim_rank.PANIC_PRICE, Share.panic_credit + claim_rank.PANIC_GAIN
    options = {"synchronize_session": False}
    paid = clock.where(Share.panic_credit >= price).values(panic_credit=Share.panic_credit - price)
    if session.execute(paid.returning(Share.vtime).execution_options(**options)).all():
        return True
    session.execute(clock.where(saved <= claim_rank.PANIC_MOST).values(panic_credit=saved).execution_options(**options))
    return False


def _advance(session: Session, model_digest: str, candidates: Sequence[Candidate], before: int, clock: int) -> None:
    """Store what a claim has found out: the clock has moved on, and who has come (back) is level with it for good."""
    behind = sorted({batch.project_id for batch in candidates if batch.vtime < clock})
    if clock <= before and not behind:
        return
    raised = update(Share).where(Share.model_digest == model_digest, Share.vtime < clock).values(vtime=clock)
    raised = raised.returning(Share.vtime).execution_options(synchronize_session=False)
    if clock > before:
        session.execute(raised.where(Share.project_id == _CLOCK))
    for project_id in behind:
        if not session.execute(raised.where(Share.project_id == project_id)).all():
            _add_share(session, model_digest, project_id, clock)


def _add_share(session: Session, model_digest: str, project_id: str, vtime: int) -> None:
    row = {"model_digest": model_digest, "project_id": project_id, "vtime": vtime, "panic_credit": 0}
    session.execute(insert(session, Share).values(row).on_conflict_do_nothing())


# ---- the lock


@cache
def _look_statement(now: str) -> Select[*tuple[Any, ...]]:
    """The time, whether the model has suspects at all (served by ix_units_suspect), its clock, and whether an operator
    lets this worker claim nothing."""
    suspect = exists(select(Unit.id).where(Unit.model_digest == _DIGEST, Unit.is_suspect))
    clock = select(Share.vtime).where(Share.model_digest == _DIGEST, Share.project_id == _CLOCK)
    is_held = hold_queries.is_held(bindparam("p_owner", type_=String), _DIGEST)
    return select(literal_column(now, BigInt), suspect, clock.scalar_subquery(), is_held)


def _lease_suspect(session: Session, claimer: Claimer) -> list[LeasedUnit] | None:
    """Lease a suspect, or nothing because of one. None: no suspect concerns this claimer."""
    waiting = and_(*claimable(claimer.now_ms, is_night=claimer.is_night))
    suspects = session.execute(
        select(Unit.state, Unit.owner)
        .join(Batch, Batch.id == Unit.batch_id)
        .where(Unit.model_digest == claimer.model_digest, Unit.is_suspect, or_(Unit.state == "leased", waiting))
    ).all()
    holders = {suspect.owner for suspect in suspects if suspect.state == "leased"}
    if claimer.owner in holders:
        return []
    if not suspects or holders or not _is_warden(session, claimer):
        return None
    held = select(Unit.id).where(Unit.state == "leased", Unit.owner == claimer.owner).limit(1)
    if session.scalar(held) is not None:
        return []
    return _lease(session, claimer, "suspect", 1, p_digest=claimer.model_digest)


def _is_warden(session: Session, claimer: Claimer) -> bool:
    """Whether this is the engine that runs suspects: the first of those that live, or anyone if none was heard of."""
    silent_ms = (claimer.lease_ms - claimer.now_ms) // _SILENT_SHARE
    living = (Worker.beat_ms >= claimer.now_ms - silent_ms, Worker.is_draining.is_(False))
    first = session.scalar(select(func.min(Worker.id)).where(Worker.model_digest == claimer.model_digest, *living))
    return first in (None, claimer.owner)


def _lease(session: Session, claimer: Claimer, kind: Kind, limit: int, **chosen: str) -> list[LeasedUnit]:
    """Lease the first units of a kind that nobody else is about to take; `chosen` are further parameters."""
    given = {"p_now": claimer.now_ms, "p_limit": limit, "p_owner": claimer.owner, "p_lease_ms": claimer.lease_ms}
    rows = session.connection().execute(_lease_statement(kind, claimer.is_night), given | chosen).all()
    return [
        LeasedUnit(row.id, row.epoch, row.est_tokens * row.lacking // row.num_lines + row.lacking)
        for row in sorted(rows, key=lambda row: row.no)
    ]


@cache
def _lease_statement(kind: Kind, is_night: bool) -> ReturningUpdate[*tuple[Any, ...]]:
    """Suspects the biggest first: a half that crashed is split, and its sibling, bigger than the quarters, comes before
    them. So the innocent half is cleared, and the batch shows progress, between two crashes of a poison line.
    """
    is_claimable = claimable(_NOW, is_night=is_night)
    ranked: Conditions = (
        Unit.batch_id == bindparam("p_batch"),
        _is_of(_DIGEST),
        Unit.is_suspect.is_(False),
        *is_claimable,
    )
    suspect: Conditions = (Unit.model_digest == _DIGEST, Unit.is_suspect, *is_claimable)
    condemned = (Unit.is_suspect, Unit.state == "ready", Unit.crash_count >= poison.CRASHES, is_running(_NOW))
    which = {"ranked": ranked, "suspect": suspect, "poison": condemned}[kind]
    biggest_first = (Unit.num_done - Unit.num_lines, Unit.batch_id, Unit.no)
    picked = (
        select(Unit.id)
        .join(Batch, Batch.id == Unit.batch_id)
        .where(*which)
        .order_by(*(biggest_first if kind == "suspect" else (Unit.no,)))
        .limit(bindparam("p_limit", type_=Integer))
        .with_for_update(skip_locked=True, of=Unit)
        .cte("picked")
    )
    lacking = (Unit.num_lines - Unit.num_done).label("lacking")
    return (
        update(Unit)
        .where(Unit.id.in_(select(picked.c.id)))
        .values(state="leased", epoch=Unit.epoch + 1, owner=bindparam("p_owner"), lease_ms=bindparam("p_lease_ms"))
        .values(granted_nanos=0, spent_nanos=0, is_metered=False)
        .returning(Unit.id, Unit.epoch, Unit.no, Unit.est_tokens, Unit.num_lines, lacking)
    )
