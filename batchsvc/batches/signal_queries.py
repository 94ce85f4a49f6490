"""SQL of an operator's signals: what is leased, what waits longest, how near deadlines are, what doesn't get on.

Everything here is read at each scrape, so each statement is served by an index or reads what is unfinished alone. What
test keys have run wakes nobody: a magic prompt may be late, or slow, because somebody wants to see just that.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.batches import claim_queries, hold_queries
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.tables import Batch, ClaimHold, Export, Unit

_IS_LIVE = Batch.project_id.not_like(mode.LIKE, escape="\\")


class Held(NamedTuple):
    """Units of a model that workers have, and those that run alone because engines crashed with them."""

    leased: int
    suspect: int


def held(session: Session) -> dict[str, Held]:
    """By the digest of the model. Served by ix_units_lease and ix_units_suspect."""
    leased = _counted(session, Unit.state == "leased")
    suspect = _counted(session, and_(Unit.is_suspect, Unit.state.in_(("ready", "leased"))))
    return {digest: Held(leased.get(digest, 0), suspect.get(digest, 0)) for digest in leased | suspect}


def oldest_claimable_ms(session: Session, now: int, *, is_night: bool) -> dict[str, int]:
    """When the oldest batch that has a claimable unit began to run, by the digest of the model."""
    waiting = (
        select(Unit.model_digest, func.min(Batch.in_progress_ms))
        .join(Batch, Batch.id == Unit.batch_id)
        .where(*claim_queries.claimable(now, is_night=is_night), Batch.in_progress_ms.is_not(None), _IS_LIVE)
        .group_by(Unit.model_digest)
    )
    return {digest: began_ms for digest, began_ms in session.execute(waiting) if began_ms is not None}


def nearest_latest_start_ms(session: Session) -> dict[tuple[str, str], int]:
    """The time at which the first running batch becomes late, by tier and digest of its model ("": several models).

    A batch that an operator or its project has paused, or that waits for quota or money, is late by somebody's will:
    it is left out.
    """
    runs = (Batch.status == Status.IN_PROGRESS, Batch.is_paused.is_(False), Batch.has_quota, Batch.has_budget, _IS_LIVE)
    found = (
        select(Batch.tier, Batch.model_digest, func.min(Batch.latest_start_ms))
        .where(*runs, Batch.latest_start_ms.is_not(None), Batch.completed + Batch.failed < Batch.total)
        .group_by(Batch.tier, Batch.model_digest)
    )
    return {(tier, digest or ""): at_ms for tier, digest, at_ms in session.execute(found) if at_ms is not None}


def waiting_since_ms(session: Session, now: int) -> dict[Status, int]:
    """Since when the batch that is longest in a passing state is in it: validating, finalizing, cancelling. One that is
    still in progress after its deadline counts as finalizing since then."""
    since = {
        Status.VALIDATING: Batch.created_ms,
        Status.FINALIZING: Batch.finalizing_ms,
        Status.CANCELLING: Batch.cancelling_ms,
    }
    found: dict[Status, int] = {}
    for status, column in since.items():
        oldest = session.scalar(select(func.min(column)).where(Batch.status == status, _IS_LIVE))
        if oldest is not None:
            found[status] = int(oldest)
    over = (Batch.status == Status.IN_PROGRESS, Batch.expires_ms < now, _IS_LIVE)
    overdue = session.scalar(select(func.min(Batch.expires_ms)).where(*over))
    if overdue is not None:
        found[Status.FINALIZING] = min(int(overdue), found.get(Status.FINALIZING, now))
    return found


def paused(session: Session) -> int:
    """How many unfinished batches are paused by an operator, or because engines crashed with them."""
    unfinished = Batch.status.in_(
        [status for status in Status if status not in TERMINAL]
    )  # as ix_batches_status has it
    stopped = and_(Batch.is_paused, or_(Batch.pause_reason.is_not(None), Batch.is_own_pause.is_(False)))
    return session.scalar(select(func.count()).where(unfinished, stopped)) or 0


def holds(session: Session) -> dict[str, int]:
    """How many orders there are that nothing new is claimed: by anybody, of a model, by a worker (hold_queries.py)."""
    kinds = [target.partition(":")[0] for target in session.scalars(select(ClaimHold.target))]
    return {
        "everything": kinds.count(hold_queries.EVERYTHING),
        "model": kinds.count("model"),
        "worker": kinds.count("worker"),
    }


def oldest_export_ms(session: Session) -> int | None:
    """When the batch ended whose results wait longest to get into a tenant's store; None if none does."""
    pending = select(func.min(Batch.ended_ms)).join(Export, Export.batch_id == Batch.id)
    oldest = session.scalar(pending.where(Export.state == "pending"))
    return None if oldest is None else int(oldest)


def _counted(session: Session, which: ColumnElement[bool]) -> dict[str, int]:
    counted = select(Unit.model_digest, func.count()).where(which).group_by(Unit.model_digest)
    return {digest: int(num) for digest, num in session.execute(counted)}
