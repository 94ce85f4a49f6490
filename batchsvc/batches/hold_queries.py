"""SQL of holds: an operator's orders that nothing new is claimed, by anybody, of a model, or by a worker.

    *               nobody claims anything
    model:DIGEST    nobody claims units of this model
    worker:NAME     this worker claims nothing: it is drained. NAME is its name, which outlives its process, or its id

Every claim asks for them in the statement that it begins with (claim_queries.py), so what was committed before holds
for it. What runs goes on to its end, and whoever counts what may run counts nothing that is held.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import ColumnElement, String, delete, exists, literal, or_, select
from sqlalchemy.orm import Session

from batchsvc.batches.tables import ClaimHold, Worker
from batchsvc.db.insert import insert
from batchsvc.db.session import database_now_ms

EVERYTHING = "*"
MODEL, WORKER = "model:", "worker:"


def hold(session: Session, target: str, reason: str) -> None:
    """Order a hold. One that is there gets the new reason."""
    ordered = insert(session, ClaimHold).values(target=target, reason=reason, created_ms=database_now_ms(session))
    session.execute(
        ordered.on_conflict_do_update(index_elements=("target",), set_={"reason": reason}),
        execution_options={"synchronize_session": False},
    )


def end(session: Session, target: str) -> bool:
    """End a hold. Returns whether there was one."""
    ended = delete(ClaimHold).where(ClaimHold.target == target).returning(ClaimHold.target)
    return bool(session.execute(ended).all())


def every(session: Session) -> dict[str, ClaimHold]:
    """All holds by their targets."""
    found = select(ClaimHold).order_by(ClaimHold.target).execution_options(populate_existing=True)
    return {row.target: row for row in session.scalars(found)}


def of_worker(session: Session, worker_id: str) -> str | None:
    """Why this worker is drained; None: it isn't."""
    found = session.scalars(select(ClaimHold.reason).where(_is_of_worker(literal(worker_id))).limit(1))
    return found.first()


def workers_of(session: Session, targets: Collection[str]) -> list[Worker]:
    """The processes, living or not, that go by one of these names or ids."""
    return list(session.scalars(select(Worker).where(or_(Worker.id.in_(targets), Worker.name.in_(targets)))))


def is_held(worker_id: ColumnElement[str], digest: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether a worker may claim nothing of a model now, as a condition."""
    others = ClaimHold.target.in_((EVERYTHING, literal(MODEL, String) + digest))
    return exists(select(ClaimHold.target).where(or_(others, _is_of_worker(worker_id))))


def is_model_held(digest: ColumnElement[str]) -> ColumnElement[bool]:
    """Whether nobody may claim units of a model now, as a condition."""
    return exists(
        select(ClaimHold.target).where(
            or_(ClaimHold.target == EVERYTHING, ClaimHold.target == literal(MODEL, String) + digest)
        )
    )


def _is_of_worker(worker_id: ColumnElement[str]) -> ColumnElement[bool]:
    name = select(Worker.name).where(Worker.id == worker_id).scalar_subquery()
    return or_(
        ClaimHold.target == literal(WORKER, String) + worker_id,
        ClaimHold.target == literal(WORKER, String) + name,
    )
