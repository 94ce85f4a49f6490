"""SQL of budgets: what a batch reserves when it is planned, and what its units may spend before they spend it.

    start   reserves what the batch will probably cost, at most `max_cost`. Without room in the project's limits it
            waits (`has_budget` false, its units aren't claimable) or fails, as its `on_quota` says. None fails
            for want of what interactive calls hold: soon they will have spent it, or not.
    grant   gives a leased unit a share of what the batch holds, and extends the reservation where limits allow it. The
            worker lets a line into the engine only if the most it can cost fits the grant, so nothing is overspent:
            what a batch was charged and what its units may yet spend is never more than what was reserved for it.
    cover   extends the reservation of a batch without limits whose answers are longer than expected.
    admit   lets a batch run (on) that waited, when there is room again.

A grant needs no giving back: it is void with the lease that it was made to, as every write under that lease is.
Who decides holds the batch, then its unit, then (if its project has limits) the project's balance.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Unit
from batchsvc.billing import service as billing
from batchsvc.db.session import database_now_ms
from batchsvc.files.lines import Problem
from batchsvc.money import format_dollars

_FAIL = "fail"  # what `on_quota` says of a batch that won't wait
CODE = "budget_exceeded"


class Verdict(StrEnum):
    """What becomes of lines that don't fit a grant: they fit, or will when others of the batch have ended (`later`),
    or when the project has money again (`wait`), or never (`over`)."""

    FITS = "fits"
    LATER = "later"
    WAIT = "wait"
    OVER = "over"


class Grant(NamedTuple):
    """All that a unit may spend under its lease, and what becomes of what that isn't enough for."""

    granted_nanos: int
    verdict: Verdict


def start(session: Session, batch: Batch, high_nanos: int) -> Problem | None:
    """Settle reservation and `has_budget` of a batch whose planning ends. A problem: it must fail instead."""
    wanted = high_nanos if batch.max_cost_nanos is None else min(high_nanos, batch.max_cost_nanos)
    coming_nanos = _coming_nanos(session, batch)
    room = billing.room_nanos(session, batch.project_id)
    if room is None:
        batch.reserved_nanos = wanted
        return None
    budget_nanos = billing.limits_of(session, batch.project_id).budget_nanos
    needs = f"It will cost up to {format_dollars(wanted)}"
    if budget_nanos is not None and wanted > budget_nanos:
        return _refusal(f"{needs}, and the monthly budget is {format_dollars(budget_nanos)}: a lower max_cost fits.")
    is_first = session.scalar(select(Batch.id).where(*_waits(session, batch.project_id)).limit(1)) is None
    if is_first and wanted <= room:
        batch.reserved_nanos = wanted
    elif batch.on_quota == _FAIL and not (is_first and wanted <= room + coming_nanos):
        return _refusal(f"{needs}, and {format_dollars(room)} of the budget or balance of its project are left.")
    else:
        batch.has_budget, batch.wanted_nanos = False, wanted
    return None


def grant(
    session: Session, unit_id: str, epoch: int, *, want_nanos: int, used_nanos: int = 0, need_nanos: int = 0
) -> Grant | None:
    """Let a unit spend up to `want_nanos` under its lease, what it has spent included. None: the unit is lost.

    `need_nanos`: none of its lines runs, and none can with less. If that can't be had, its grant is cut to the
    `used_nanos` of the lines that have ended, so that others can have the rest, and the verdict says why; if the
    project has no money, the batch waits from now on.
    """
    batch_id = session.scalar(select(Unit.batch_id).where(Unit.id == unit_id))
    batch = session.get(Batch, batch_id or "", with_for_update=True, populate_existing=True)
    unit = session.get(Unit, unit_id, with_for_update=True, populate_existing=True)
    if batch is None or unit is None or unit.state != "leased" or unit.epoch != epoch:
        return None
    unit.is_metered = True
    others = _outstanding(session, batch.id, unit_id)
    coming_nanos = _coming_nanos(session, batch)
    reach = unit.spent_nanos + batch.reserved_nanos - batch.cost_nanos - others
    cap = None if batch.max_cost_nanos is None else max(0, batch.max_cost_nanos - batch.reserved_nanos)
    missing = want_nanos - reach
    if missing > 0 and cap != 0:
        room = billing.room_nanos(session, batch.project_id)
        more = min([missing, *(bound for bound in (cap, room) if bound is not None)])
        if more > 0:
            _extend(session, batch, more)
            reach += more
    unit.granted_nanos = max(unit.granted_nanos, min(want_nanos, reach))
    lacks = need_nanos - unit.granted_nanos
    if lacks <= 0:
        return Grant(unit.granted_nanos, Verdict.FITS)
    unit.granted_nanos = used_nanos
    if others > 0:
        return Grant(used_nanos, Verdict.LATER)
    is_capped = batch.max_cost_nanos is not None and lacks > batch.max_cost_nanos - batch.reserved_nanos
    is_final = batch.on_quota == _FAIL and lacks > coming_nanos
    if is_capped or is_final or batch.status != Status.IN_PROGRESS:
        return Grant(used_nanos, Verdict.OVER)
    batch.has_budget, batch.wanted_nanos = False, lacks
    return Grant(used_nanos, Verdict.WAIT)


def cover(session: Session, batch: Batch) -> None:
    """Reserve what a batch was charged beyond its reservation, before that is posted. The caller has locked it."""
    if batch.cost_nanos > batch.reserved_nanos:
        _extend(session, batch, batch.cost_nanos - batch.reserved_nanos)


def waiting(session: Session) -> dict[str, list[str]]:
    """Batches that wait for money by their project, the oldest first."""
    found: dict[str, list[str]] = {}
    oldest_first = (Batch.created_ms, Batch.id)
    for row in session.execute(select(Batch.project_id, Batch.id).where(*_waits(session)).order_by(*oldest_first)):
        found.setdefault(row[0], []).append(row[1])
    return found


def admit(session: Session, batch_id: str) -> bool:
    """Let a batch that waits run (on), if there is room for what it wants."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if batch is None or batch.has_budget or batch.status != Status.IN_PROGRESS:
        return False
    coming_nanos = _coming_nanos(session, batch)
    room, wanted_nanos = billing.room_nanos(session, batch.project_id), batch.wanted_nanos
    if room is not None and room < wanted_nanos:
        if batch.on_quota == _FAIL and room + coming_nanos < wanted_nanos:
            batch.has_budget, batch.wanted_nanos = True, 0  # no use in waiting: grants tell its lines so
            return True
        return False
    if batch.max_cost_nanos is not None:  # its other units may have got money since
        wanted_nanos = min(wanted_nanos, max(0, batch.max_cost_nanos - batch.reserved_nanos))
    if wanted_nanos:
        _extend(session, batch, wanted_nanos)
    batch.has_budget, batch.wanted_nanos = True, 0
    return True


def _coming_nanos(session: Session, batch: Batch) -> int:
    """What may come back to the project by itself, as calls that run hold it: no verdict is final where that would be
    enough. To be read before the room, or a hold that ends in between would be missing in both; 0 where nobody asks."""
    if batch.on_quota != _FAIL:
        return 0
    return billing.held_by_calls_nanos(session, batch.project_id)


def _extend(session: Session, batch: Batch, amount_nanos: int) -> None:
    batch.reserved_nanos += amount_nanos
    billing.post_extend(session, batch, amount_nanos, batch.reserved_nanos)


def _outstanding(session: Session, batch_id: str, unit_id: str) -> int:
    """What the other units of a batch may yet spend."""
    left = func.coalesce(func.sum(Unit.granted_nanos - Unit.spent_nanos), 0)
    others = (Unit.batch_id == batch_id, Unit.state == "leased", Unit.id != unit_id)
    # one that was claimed before there were limits spends without a grant
    return int(session.scalar(select(left).where(*others, Unit.granted_nanos > Unit.spent_nanos)) or 0)


def _waits(session: Session, project_id: str | None = None) -> tuple[ColumnElement[bool], ...]:
    now = database_now_ms(session)
    waits = (Batch.status == Status.IN_PROGRESS, Batch.has_budget.is_(False), Batch.expires_ms > now)
    return waits if project_id is None else (*waits, Batch.project_id == project_id)


def _refusal(says: str) -> Problem:
    return Problem(line=None, code=CODE, message=f"{says} Nothing was run.", param=None)
