"""SQL of models, batches and workers as the API reads and writes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Select, exists, func, or_, select, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import ColumnElement

from batchsvc.batches.tables import Batch, Garbage, Model, Worker
from batchsvc.db.keyset import Cursor, page
from batchsvc.files.tables import File

PRIVATE = "private"
"""What metrics call a model of one project in place of its name."""


def model(session: Session, name: str) -> Model | None:
    """One model or alias by its exact name."""
    return session.get(Model, name)


def models_of(session: Session, digest: str) -> list[Model]:
    """The models of a digest, under all their names. Served by ix_models_digest."""
    return list(session.scalars(select(Model).where(Model.digest == digest, Model.alias_of.is_(None))))


def models(session: Session) -> list[Model]:
    """All models and aliases."""
    return list(session.scalars(select(Model)))


def batch(session: Session, project_id: str, batch_id: str) -> Batch | None:
    """One batch of a project that nobody has deleted, as it is now."""
    found = select(Batch).where(Batch.id == batch_id, Batch.project_id == project_id, Batch.deleted_ms.is_(None))
    return session.scalars(found.execution_options(populate_existing=True)).first()


def batches(
    session: Session, project_id: str, *, after: Cursor | None, limit: int, ascending: bool, name: str | None
) -> list[Batch]:
    """At most `limit` batches of a project beyond `after`. Served by ix_batches_listing."""
    wanted = select(Batch).where(Batch.project_id == project_id, Batch.deleted_ms.is_(None))
    if name is not None:
        wanted = wanted.where(Batch.name == name)
    return list(session.scalars(page(wanted, Batch.created_ms, Batch.id, after, limit, ascending)))


def cursor(session: Session, project_id: str, batch_id: str) -> Cursor | None:
    """Where a batch stands in listings; a deleted one keeps its place, so that a walk over pages goes on."""
    found = select(Batch.created_ms, Batch.id).where(Batch.id == batch_id, Batch.project_id == project_id)
    row = session.execute(found).first()
    return Cursor(row.created_ms, row.id) if row else None


def batches_like(session: Session, api_key_id: str, input_file_id: str, since_ms: int) -> list[Batch]:
    """Batches that a key has made of a file since then, newest first: candidates for a repeated create."""
    wanted = select(Batch).where(
        Batch.input_file_id == input_file_id,
        Batch.api_key_id == api_key_id,
        Batch.created_ms >= since_ms,
        Batch.deleted_ms.is_(None),
    )
    return list(session.scalars(wanted.order_by(Batch.created_ms.desc(), Batch.id.desc())))


def continuations(session: Session, api_key_id: str, parent: Batch, since_ms: int) -> list[Batch]:
    """Batches that a key has made of lines of an ended batch since then, newest first."""
    wanted = select(Batch).where(
        Batch.input_file_id == parent.input_file_id,
        Batch.parent_batch_id == parent.id,
        Batch.api_key_id == api_key_id,
        Batch.created_ms >= since_ms,
        Batch.deleted_ms.is_(None),
    )
    return list(session.scalars(wanted.order_by(Batch.created_ms.desc(), Batch.id.desc())))


def live_batch_of(session: Session, file_id: str, ended: Collection[str]) -> str | None:
    """A batch that still reads this file, or None. `ended` are the statuses of batches that read nothing more."""
    reading = select(Batch.id).where(Batch.input_file_id == file_id, Batch.status.not_in(ended))
    return session.scalars(reading.limit(1)).first()


def is_read(ended: Collection[str]) -> ColumnElement[bool]:
    """Whether a batch still reads a file, as a condition on rows of files."""
    return exists(select(Batch.id).where(Batch.input_file_id == File.id, Batch.status.not_in(ended)))


def running(session: Session, project_ids: Collection[str]) -> list[Batch]:
    """The batches of these projects whose lines run. Served by ix_batches_status."""
    mine = (Batch.status == "in_progress", Batch.project_id.in_(project_ids))
    return list(session.scalars(select(Batch).where(*mine).order_by(Batch.id)))


def capped(session: Session, project_ids: Collection[str], statuses: Collection[str], ended_ms: int) -> list[Batch]:
    """The batches of these projects with a `max_cost` that are in these statuses, or have ended since then."""
    live = or_(Batch.status.in_(statuses), Batch.ended_ms >= ended_ms)
    mine = (Batch.max_cost_nanos.is_not(None), Batch.cost_nanos > 0, Batch.project_id.in_(project_ids))
    return list(session.scalars(select(Batch).where(*mine, live).order_by(Batch.id)))


def update_batch(
    session: Session, batch_id: str, *, from_: Collection[str], fence: Mapping[str, Any], values: Mapping[str, Any]
) -> bool:
    """Change a batch only if it is in one of these statuses and the columns of `fence` are as said."""
    guarded = update(Batch).where(Batch.id == batch_id, Batch.status.in_(from_))
    for column, value in fence.items():
        guarded = guarded.where(getattr(Batch, column) == value)
    changed = session.execute(guarded.values(**values).returning(Batch.id)).all()
    return bool(changed)


def served_digests(session: Session, since_ms: int) -> set[str]:
    """Models of the workers that gave a sign of life since then and take new work."""
    alive = select(Worker.model_digest).where(Worker.beat_ms >= since_ms, Worker.is_draining.is_(False))
    return set(session.scalars(alive.distinct()))


def names_by_digest(session: Session) -> dict[str, str]:
    """The oldest name of each model that was registered."""
    names: dict[str, str] = {}
    for row in sorted(models(session), key=lambda row: (row.created_ms, row.id)):
        if row.alias_of is None:
            names.setdefault(row.digest, row.id)
    return names


def labels_by_digest(session: Session) -> dict[str, str]:
    """What metrics call each registered model: its oldest name that is for everybody, or PRIVATE if only one project
    may know it."""
    labels: dict[str, str] = {}
    for row in sorted(models(session), key=lambda row: (row.project_id is not None, row.created_ms, row.id)):
        if row.alias_of is None:
            labels.setdefault(row.digest, row.id if row.project_id is None else PRIVATE)
    return labels


def batches_by_status(session: Session) -> dict[str, int]:
    """Number of batches in each status that occurs."""
    return _counts(session, select(Batch.status, func.count()).group_by(Batch.status))


def num_open(session: Session, project_id: str, api_key_id: str | None, statuses: Collection[str]) -> int:
    """Batches of a project, or of one of its keys, in these statuses. Served by ix_batches_status or, of a small
    project, by ix_batches_listing."""
    found = select(func.count()).where(Batch.project_id == project_id, Batch.status.in_(statuses))
    return session.scalar(found if api_key_id is None else found.where(Batch.api_key_id == api_key_id)) or 0


def live_workers_by_model(session: Session, since_ms: int) -> dict[str, int]:
    """Number of workers that gave a sign of life since then, by the digest of their model."""
    alive = select(Worker.model_digest, func.count()).where(Worker.beat_ms >= since_ms, Worker.switching_to.is_(None))
    return _counts(session, alive.group_by(Worker.model_digest))


def probe_write(session: Session) -> None:
    """Write something and take it back: proof that the database takes writes and has our tables."""
    with session.begin_nested() as savepoint:
        session.add(Garbage(s3_key="", not_before_ms=0))
        session.flush()
        savepoint.rollback()


def _counts(session: Session, query: Select[str, int]) -> dict[str, int]:
    return {row[0]: row[1] for row in session.execute(query)}
