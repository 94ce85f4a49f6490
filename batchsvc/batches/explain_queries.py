"""The SQL of explaining: where the plan of a window is, which parts delivered its lines, what workers say."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.batches.tables import Batch, Part, Unit, Window, Worker


def batch(session: Session, batch_id: str) -> Batch | None:
    """A batch of any project, for an operator."""
    return session.get(Batch, batch_id)


def windows(session: Session, batch_id: str) -> list[Window]:
    """The windows of a batch in input order."""
    return list(session.scalars(select(Window).where(Window.batch_id == batch_id).order_by(Window.no)))


def units(session: Session, batch_id: str, window_no: int) -> list[Unit]:
    """The units of a window in plan order; one that was split from another names the same file."""
    found = select(Unit).where(Unit.batch_id == batch_id, Unit.window_no == window_no)
    return list(session.scalars(found.order_by(Unit.no)))


def parts(session: Session, batch_id: str, window_no: int) -> list[Part]:
    """The parts of a window that count, oldest first."""
    found = select(Part).where(Part.batch_id == batch_id, Part.window_no == window_no, Part.is_void.is_(False))
    return list(session.scalars(found.order_by(Part.created_ms, Part.id)))


def workers(session: Session, model_digest: str) -> list[Worker]:
    """The workers of a model that are known."""
    return list(session.scalars(select(Worker).where(Worker.model_digest == model_digest)))
