"""SQL of repairs: which windows have damaged objects, who rebuilds them, and what comes of it.

    a unit's file         found by the worker that leased it: leased -> pending, epoch + 1, its window is marked
    rejected lines' part  found by the finalizer: void, its window is marked
    line numbers' file    found by the finalizer: its window is marked

One planner at a time rebuilds a window of a batch, under a new `plan_epoch` and the plan lease; what it stores counts
from its commit on: pending -> ready under the new key, a new part, a new file of line numbers. If the input can't be
read or doesn't give the same units any more: pending -> sealed, and the finalizer makes error lines (`unit_unreadable`)
of what lacks. A batch that ends meanwhile seals its pending units as all others. Lock order is batch, then the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.orm import Session

from batchsvc.batches import model_pins, plan_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.plan_queries import Input, PlanClaim, RejectedPart, WindowObject
from batchsvc.batches.tables import Batch, Model, Part, Unit, Window
from batchsvc.db.session import database_now_ms
from batchsvc.files import service as files

_REPAIRABLE = (Status.IN_PROGRESS, Status.FINALIZING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A window to rebuild. `units` are the SHA-256 of the lacking unit files by unit id; `num_rejected` the lines of a
    part to make again, 0 for none. `claim` reads the window as it was read first."""

    claim: PlanClaim
    model_paths: dict[str, str]  # of what is pinned; "" where a model is gone
    num_lines: int
    units: dict[str, str]
    num_rejected: int
    line_nos_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What is stored again: keys of unit files by unit id. What couldn't be made is missing."""

    units: dict[str, str]
    rejected: RejectedPart | None
    line_nos: WindowObject | None


def return_unit(session: Session, unit_id: str, epoch: int) -> bool:
    """Have the file of a leased unit rebuilt, because it is damaged. False: the unit was lost."""
    batch_id = session.scalar(select(Unit.batch_id).where(Unit.id == unit_id))
    session.get(Batch, batch_id or "", with_for_update=True, populate_existing=True)
    unit = session.get(Unit, unit_id, with_for_update=True, populate_existing=True)
    if unit is None or unit.state != "leased" or unit.epoch != epoch:
        return False
    unit.state, unit.epoch, unit.owner = "pending", epoch + 1, None
    session.get_one(Window, (unit.batch_id, unit.window_no)).is_damaged = True
    return True


def due(session: Session) -> list[str]:
    """Batches with a window that nobody rebuilds."""
    damaged = exists(select(Window.no).where(Window.batch_id == Batch.id, Window.is_damaged))
    waiting = (Batch.status.in_(_REPAIRABLE), Batch.plan_lease_ms < database_now_ms(session), damaged)
    return list(session.scalars(select(Batch.id).where(*waiting).order_by(Batch.created_ms)))


def claim(session: Session, batch_id: str, owner: str, lease_s: float) -> Broken | None:
    """Take the right to rebuild the first damaged window of a batch. None: there is none, or somebody is at it."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    now = database_now_ms(session)
    if batch is None or batch.status not in _REPAIRABLE or batch.plan_lease_ms > now:
        return None
    windows = session.scalars(select(Window).where(Window.batch_id == batch_id).order_by(Window.no)).all()
    window = next((window for window in windows if window.is_damaged), None)
    if window is None:
        return None
    batch.plan_epoch += 1
    batch.plan_owner, batch.plan_lease_ms = owner, now + round(lease_s * 1000)
    file = files.find_stored(session, batch.project_id, batch.input_file_id)
    before = windows[: window.no]
    units = session.scalars(select(Unit).where(*_of(window), Unit.state == "pending")).all()
    rejected = session.scalar(
        select(func.coalesce(func.sum(Part.lines_err), 0)).where(
            Part.batch_id == batch_id, Part.window_no == window.no, Part.unit_id.is_(None), ~Part.is_void
        )
    )
    found = {pin.id: session.get(Model, pin.id) for pin in model_pins.pins_of(batch)}
    return Broken(
        claim=PlanClaim(
            batch_id=batch_id,
            project_id=batch.project_id,
            epoch=batch.plan_epoch,
            endpoint=batch.endpoint,
            is_strict=batch.on_invalid != "skip",
            model_requested=batch.model_requested,
            model_id=batch.model_id,
            aliases=batch.aliases,
            input=Input.of(file),
            window_no=window.no,
            unit_no=0,
            first_line=before[-1].last_line + 1 if before else 1,
            offset=before[-1].next_offset if before else 0,
            num_lines=0,
            num_problems=0,
            num_listed=0,
            finished_windows=plan_queries.objects_of(before),
            limits=batch.plan_limits,
            template_sha256=batch.template_sha256,
            chosen_lines=batch.chosen_lines,
            models=batch.models,
        ),
        model_paths={name: model.path if model else "" for name, model in found.items()},
        num_lines=window.num_lines,
        units={unit.id: unit.sha256 for unit in units},
        num_rejected=window.num_rejected - int(rejected or 0),
        line_nos_sha256=window.line_nos_sha256,
    )


def keep(session: Session, batch_id: str, epoch: int, lease_s: float) -> bool:
    """Prolong the lease. False: it is lost."""
    batch = _mine(session, batch_id, epoch)
    if batch is not None:
        batch.plan_lease_ms = database_now_ms(session) + round(lease_s * 1000)
    return batch is not None


def commit(session: Session, broken: Broken, rebuilt: Rebuilt) -> bool:
    """Make what was rebuilt count, and give up what wasn't. False: the lease is lost, nothing was written."""
    claim = broken.claim
    batch = _mine(session, claim.batch_id, claim.epoch)
    window = session.get(Window, (claim.batch_id, claim.window_no), populate_existing=True)
    if batch is None or window is None:
        return False
    if not window.is_damaged:
        return True  # the answer to the commit was lost
    units = select(Unit).where(*_of(window), Unit.state == "pending", Unit.id.in_(broken.units)).with_for_update()
    for unit in session.scalars(units.execution_options(populate_existing=True)):
        key = rebuilt.units.get(unit.id)
        unit.s3_key, unit.state = (key, "ready") if key else (unit.s3_key, "sealed")
        unit.epoch += 1
        unit.lease_ms = unit.not_before_ms = unit.ticket_ms = 0
    if rebuilt.rejected is not None:
        plan_queries.add_rejected(session, batch, window.no, rebuilt.rejected)
        batch.failed += rebuilt.rejected.num_lines
    if rebuilt.line_nos is not None:
        window.line_nos_key, window.line_nos_sha256 = rebuilt.line_nos.key, rebuilt.line_nos.sha256
    session.flush()
    later = select(func.count(Unit.id)).where(*_of(window), Unit.state == "pending")
    window.is_damaged = bool(session.scalar(later))  # found damaged meanwhile
    batch.plan_owner, batch.plan_lease_ms = None, 0
    return True


def _of(window: Window) -> tuple[ColumnElement[bool], ...]:
    return (Unit.batch_id == window.batch_id, Unit.window_no == window.no)


def _mine(session: Session, batch_id: str, epoch: int) -> Batch | None:
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    return batch if batch and batch.status in _REPAIRABLE and batch.plan_epoch == epoch else None
