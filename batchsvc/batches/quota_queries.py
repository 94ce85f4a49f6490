"""SQL of quotas: the predicted tokens that the unfinished batches of a project may hold at once; others wait.

Nothing is counted up or down: what a project holds is the sum over the batches that hold it, so a batch that ends,
in whatever way, has given its share back. Whoever decides holds the project's row, so two never take the same room.
A batch that alone is over the quota is refused; should the quota have been lowered meanwhile, it runs alone.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.quota import Waiting, admitted
from batchsvc.batches.tables import Batch
from batchsvc.db.session import database_now_ms
from batchsvc.files.lines import Problem

_FAIL = "fail"  # what `on_quota` says of a batch that won't wait


def take(session: Session, batch: Batch, est_tokens: int, default_tokens: int | None) -> Problem | None:
    """Settle `has_quota` of a batch whose planning ends. A problem: it must fail instead. Locks the project's row."""
    quota = _quota(session, batch.project_id, default_tokens)
    if quota is not None and est_tokens > quota:
        return _refusal(f"It needs about {est_tokens} tokens, and the quota of its project is {quota}.")
    waiting = _waiting(session, batch.project_id)
    mine = Waiting(batch.id, est_tokens)
    held = _held_tokens(session, batch.project_id)
    fits = not waiting and bool(admitted([mine], held=held, quota=quota))
    if not fits and batch.on_quota == _FAIL:
        return _refusal(f"It needs about {est_tokens} tokens; other batches hold or await the quota of {quota}.")
    batch.has_quota = fits
    return None


def projects_waiting(session: Session) -> list[str]:
    """Projects with batches that wait for quota."""
    return list(session.scalars(select(Batch.project_id).where(*_waits(session)).distinct()))


def admit(session: Session, project_id: str, default_tokens: int | None) -> list[str]:
    """Let the batches of a project start that its quota has room for now. Returns their ids."""
    quota = _quota(session, project_id, default_tokens)
    taken = admitted(_waiting(session, project_id), held=_held_tokens(session, project_id), quota=quota)
    if taken:
        still = (Batch.id.in_(taken), Batch.status == Status.IN_PROGRESS)
        session.execute(update(Batch).where(*still).values(has_quota=True))
    return taken


def _quota(session: Session, project_id: str, default_tokens: int | None) -> int | None:
    project = accounts.locked_project(session, project_id)
    return default_tokens if project.quota_tokens is None else project.quota_tokens


def _waiting(session: Session, project_id: str) -> list[Waiting]:
    mine = select(Batch.id, Batch.est_tokens).where(Batch.project_id == project_id, *_waits(session))
    return [Waiting(*row) for row in session.execute(mine.order_by(Batch.created_ms, Batch.id))]


def _waits(session: Session) -> tuple[ColumnElement[bool], ...]:
    now = database_now_ms(session)
    return (Batch.status == Status.IN_PROGRESS, Batch.has_quota.is_(False), Batch.expires_ms > now)


def _held_tokens(session: Session, project_id: str) -> int:
    holding = (
        Batch.project_id == project_id,
        Batch.in_progress_ms.is_not(None),
        Batch.status.not_in(TERMINAL),
        Batch.has_quota.is_(True),
    )
    return int(session.scalar(select(func.coalesce(func.sum(Batch.est_tokens), 0)).where(*holding)) or 0)


def _refusal(says: str) -> Problem:
    return Problem(line=None, code="token_limit_exceeded", message=f"Enqueued token limit reached. {says}", param=None)
