"""The SQL of explaining: where the plan of a window is, which parts delivered its lines, what workers say."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, func, select
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


def used_by_model(session: Session, batch_id: str) -> dict[str, Row[Any]]:
    """What the lines of a batch that count have used, by the model of their unit."""
    names = ("input_tokens", "cached_tokens", "output_tokens", "cost_nanos")
    sums = [func.coalesce(func.sum(getattr(Part, name)), 0).label(name) for name in names]
    found = (
        select(Unit.model_id, func.coalesce(func.sum(Part.lines_ok), 0).label("requests"), *sums)
        .join(Unit, Unit.id == Part.unit_id)
        .where(Part.batch_id == batch_id, Part.is_void.is_(False))
        .group_by(Unit.model_id)
    )
    return {row.model_id or "": row for row in session.execute(found)}


def workers(session: Session, model_digest: str) -> list[Worker]:
    """The workers of a model that are known."""
    return list(session.scalars(select(Worker).where(Worker.model_digest == model_digest)))
