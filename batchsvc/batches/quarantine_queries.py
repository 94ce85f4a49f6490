"""SQL of the quarantine: lines that were found to be poison, units that are suspect, and their release.

    poison    a part of one error line (code `poison`), marked as such; its batch goes on without it
    suspect   a unit whose engine ended with it: it runs alone until it makes progress (poison.py)

To release a poison line takes its part back, as if it were damaged, and lets its unit run again with a clean record,
alone for now. That is possible while its batch runs: what is being put together, or has ended, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.batches import finalize_queries, line_set
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.tables import Batch, Part, Unit
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError

_MOST = 1_000


class PoisonLine(NamedTuple):
    """A line that ended engines. `status` is its batch's."""

    batch_id: str
    project_id: str
    status: str
    line: int
    found_ms: int


class Suspect(NamedTuple):
    """A unit that runs alone. `lines`: how many of it are unfinished; `crashes`: in a row, since it is suspect."""

    batch_id: str
    project_id: str
    unit_id: str
    lines: int
    crashes: int
    state: str


def poison(session: Session, batch_id: str | None) -> list[PoisonLine]:
    """Lines in quarantine, the newest first; of one batch, or of all. Served by ix_parts_poison."""
    found = select(Part.batch_id, Batch.project_id, Batch.status, Part.line_nos, Part.created_ms)
    found = found.join(Batch, Batch.id == Part.batch_id).where(Part.is_poison, Part.is_void.is_(False))
    if batch_id is not None:
        found = found.where(Part.batch_id == batch_id)
    rows = session.execute(found.order_by(Part.created_ms.desc(), Part.id).limit(_MOST))
    return [
        PoisonLine(row.batch_id, row.project_id, row.status, line, row.created_ms)
        for row in rows
        for line in _lines(row.line_nos)
    ]


def suspects(session: Session, batch_id: str | None) -> list[Suspect]:
    """Units that run alone, of batches that haven't ended. Served by ix_units_suspect."""
    found = select(Unit, Batch.project_id).join(Batch, Batch.id == Unit.batch_id)
    found = found.where(Unit.is_suspect, Unit.state.in_(("ready", "leased", "pending")), Batch.status.not_in(TERMINAL))
    if batch_id is not None:
        found = found.where(Unit.batch_id == batch_id)
    return [
        Suspect(unit.batch_id, project, unit.id, unit.num_lines - unit.num_done, unit.crash_count, unit.state)
        for unit, project in session.execute(found.order_by(Unit.batch_id, Unit.no).limit(_MOST))
    ]


class Released(NamedTuple):
    """What a release has changed: lines that run again, and units that don't run alone any more."""

    batch: Batch
    lines: list[int]
    units: list[str]


def release(session: Session, batch_id: str, lines: Collection[int]) -> Released:
    """Let poison lines of a running batch run again: these, or with none named all of them, and let its suspects run
    beside others. Raises NotFoundError or InvalidRequestError that says why not, and what to do instead."""
    batch = session.get(Batch, batch_id, with_for_update=True, populate_existing=True)
    if batch is None:
        raise NotFoundError(f"There is no batch {batch_id}.", param="batch_id")
    parts = session.scalars(
        select(Part)
        .where(Part.batch_id == batch_id, Part.is_poison, Part.is_void.is_(False))
        .order_by(Part.id)
        .with_for_update()
        .execution_options(populate_existing=True)
    ).all()
    wanted = [part for part in parts if not lines or set(_lines(part.line_nos)) & set(lines)]
    known = {line for part in wanted for line in _lines(part.line_nos)}
    if missing := sorted(set(lines) - known):
        raise InvalidRequestError(
            f"Line {missing[0]} of {batch_id} isn't in quarantine: `batchsvc quarantine list {batch_id}` shows what "
            "is.",
            param="lines",
        )
    if wanted or lines:
        _check(batch)
    units = [] if lines else _trust(session, batch)  # first: the lines that are released now stay alone
    now = database_now_ms(session)
    for part in wanted:
        unit = finalize_queries.take_back(session, batch, part, now, can_run=True)
        assert unit is not None, "a poison part is of a unit"
        unit.is_suspect, unit.crash_count = True, 0  # what ended engines begins alone
    if not wanted and not units:
        raise InvalidRequestError(f"Nothing of {batch_id} is in quarantine.", param="batch_id")
    return Released(batch, sorted(known), units)


def _trust(session: Session, batch: Batch) -> list[str]:
    """Suspects that nobody holds run beside others again; also those of which the reaper would make an error line."""
    found = (
        select(Unit)
        .where(Unit.batch_id == batch.id, Unit.is_suspect, Unit.state == "ready")
        .order_by(Unit.id)
        .with_for_update()
        .execution_options(populate_existing=True)
    )
    trusted = []
    for unit in session.scalars(found):
        if unit.num_done < unit.num_lines and batch.status == Status.IN_PROGRESS:
            unit.is_suspect, unit.crash_count = False, 0
            trusted.append(unit.id)
    return trusted


def _check(batch: Batch) -> None:
    if batch.status == Status.IN_PROGRESS:
        return
    if batch.status in TERMINAL:
        raise InvalidRequestError(
            f"{batch.id} is {batch.status}, and its results stay as they are: its project runs lines that have an "
            f"error again, as a new batch, with `batchsvc retry {batch.id}`.",
            code="batch_already_ended",
            param="batch_id",
        )
    raise InvalidRequestError(
        f"{batch.id} is {batch.status}: its results are being put together. When it has ended, `batchsvc retry "
        f"{batch.id}` runs its lines that have an error again, as a new batch.",
        code="batch_not_running",
        param="batch_id",
    )


def _lines(encoded: bytes | None) -> list[int]:
    return [] if encoded is None else [int(line) for line in line_set.decode(encoded)]
