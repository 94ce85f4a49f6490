"""SQL of exports: which results go into a tenant's store, who takes them there, and what came of it.

    add       with its batch, which it waits for
    claim     one that is due, of a batch that has ended, under a lease and a higher `epoch`; a project has one at a
              time on its way, so that a slow store holds up its own project alone
    begin     an upload in parts is noted before its first part, so that whoever takes over can end it
    finish    done, or due again later, or given up; under the epoch of the claim, or nothing is written

Objects over there have the same names and bytes whoever writes them, so an exporter that was overtaken does no harm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.orm import Session, aliased

from batchsvc.batches.lifecycle import TERMINAL
from batchsvc.batches.tables import Batch, Export
from batchsvc.db.session import database_now_ms

PENDING, DONE, FAILED = "pending", "done", "failed"
WAS_DELETED = "The batch was deleted before its results could be exported."
_WAITS_S = (5, 30, 120, 600, 1_800)  # and from then on the last one, again and again
_GIVE_UP = 96  # attempts: two days
_OWN_FAULT_WAIT_S = 60
_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportClaim:
    """The right to export the results of a batch. `uploads` are what earlier attempts have begun over there."""

    batch_id: str
    project_id: str
    prefix: str
    epoch: int
    uploads: list[tuple[str, str]]


def add(session: Session, batch: Batch) -> None:
    """Have the results of a new batch exported when it has ended."""
    session.add(
        Export(
            batch_id=batch.id,
            project_id=batch.project_id,
            state=PENDING,
            error=None,
            num_failures=0,
            due_ms=0,
            ended_ms=None,
            epoch=0,
            owner=None,
            lease_ms=0,
            uploads=[],
        )
    )


def of_batches(session: Session, rows: Collection[Batch]) -> Mapping[str, Export]:
    """The exports of those of these batches that have one."""
    batch_ids = [row.id for row in rows if row.output_s3 is not None]
    if not batch_ids:
        return {}
    found = session.scalars(select(Export).where(Export.batch_id.in_(batch_ids)))
    return {row.batch_id: row for row in found}


def num_due(session: Session) -> int:
    """How many exports somebody should make now. Served by ix_exports_due."""
    return session.scalar(select(func.count(Export.batch_id)).where(*_is_due(database_now_ms(session)))) or 0


def claim(session: Session, owner: str, lease_s: float) -> ExportClaim | None:
    """Take the export that has been due for longest. None: there is none."""
    now = database_now_ms(session)
    due = select(Export).where(*_is_due(now)).order_by(Export.due_ms, Export.batch_id).limit(1)
    row = session.scalars(due.with_for_update(skip_locked=True).execution_options(populate_existing=True)).one_or_none()
    if row is None:
        return None
    row.epoch += 1
    row.owner, row.lease_ms = owner, now + round(lease_s * 1000)
    return ExportClaim(
        batch_id=row.batch_id,
        project_id=row.project_id,
        prefix=session.get_one(Batch, row.batch_id).output_s3 or "",
        epoch=row.epoch,
        uploads=[(key, upload_id) for key, upload_id in row.uploads],
    )


def keep(session: Session, claimed: ExportClaim, lease_s: float) -> bool:
    """Prolong the lease. False: it is lost."""
    row = _mine(session, claimed)
    if row is not None:
        row.lease_ms = database_now_ms(session) + round(lease_s * 1000)
    return row is not None


def note_upload(session: Session, claimed: ExportClaim, key: str, upload_id: str) -> bool:
    """Note an upload in parts that was begun. False: the lease is lost."""
    row = _mine(session, claimed)
    if row is not None and [key, upload_id] not in row.uploads:
        row.uploads = [*row.uploads, [key, upload_id]]
    return row is not None


def note_cleared(session: Session, claimed: ExportClaim) -> bool:
    """Note that nothing is left of what earlier attempts have begun. False: the lease is lost."""
    row = _mine(session, claimed)
    if row is not None:
        row.uploads = []
    return row is not None


def finish(session: Session, claimed: ExportClaim) -> bool:
    """Note that all of it is there. False: the lease is lost."""
    row = _mine(session, claimed)
    if row is not None:
        row.state, row.error, row.ended_ms = DONE, None, database_now_ms(session)
        row.owner, row.lease_ms, row.uploads = None, 0, []
    return row is not None


def fail(session: Session, claimed: ExportClaim, reason: str, *, is_final: bool) -> str | None:
    """Note why an attempt failed, and when to try again, if ever. Returns the state; None: the lease is lost."""
    row = _mine(session, claimed)
    if row is None:
        return None
    now = database_now_ms(session)
    row.num_failures += 1
    row.error, row.owner, row.lease_ms = reason[:_ERROR_CHARS], None, 0
    if is_final or row.num_failures >= _GIVE_UP:
        row.state, row.ended_ms = FAILED, now
    else:
        row.due_ms = now + 1000 * _WAITS_S[min(row.num_failures, len(_WAITS_S)) - 1]
    return row.state


def postpone(session: Session, claimed: ExportClaim, reason: str) -> None:
    """Note what this deployment has to set right before an attempt can be made; none is counted."""
    row = _mine(session, claimed)
    if row is not None:
        row.error, row.owner, row.lease_ms = reason[:_ERROR_CHARS], None, 0
        row.due_ms = database_now_ms(session) + 1000 * _OWN_FAULT_WAIT_S


def give_back(session: Session, claimed: ExportClaim) -> None:
    """End the lease of an exporter that has to stop; another one goes on at once."""
    if (row := _mine(session, claimed)) is not None:
        row.owner, row.lease_ms = None, 0


def _mine(session: Session, claimed: ExportClaim) -> Export | None:
    row = session.get(Export, claimed.batch_id, with_for_update=True, populate_existing=True)
    return row if row is not None and row.state == PENDING and row.epoch == claimed.epoch else None


def _is_due(now_ms: int) -> tuple[ColumnElement[bool], ...]:
    other = aliased(Export)
    is_busy = exists(
        select(other.batch_id).where(
            other.project_id == Export.project_id, other.state == PENDING, other.lease_ms > now_ms
        )
    )
    has_ended = exists(select(Batch.id).where(Batch.id == Export.batch_id, Batch.status.in_(TERMINAL)))
    return (Export.state == PENDING, Export.due_ms <= now_ms, Export.lease_ms <= now_ms, has_ended, ~is_busy)
