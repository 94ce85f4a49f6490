"""SQL of deletions: a batch to delete, whose an object is, and when something was deleted."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.batches.tables import Batch
from batchsvc.files.retention import Kind
from batchsvc.files.tables import File


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose a file or a batch is."""

    kind: Kind
    project_id: str


def locked(session: Session, project_id: str, batch_id: str) -> Batch | None:
    """A batch of a project that nobody has deleted, locked till the transaction ends."""
    found = select(Batch).where(Batch.id == batch_id, Batch.project_id == project_id, Batch.deleted_ms.is_(None))
    return session.scalars(found.with_for_update().execution_options(populate_existing=True)).first()


def deleted_ms(session: Session, project_id: str, batch_id: str) -> int | None:
    """When a batch of a project was deleted; None: it wasn't, or there is none."""
    return session.scalar(select(Batch.deleted_ms).where(Batch.id == batch_id, Batch.project_id == project_id))


def batch_ever(session: Session, project_id: str, batch_id: str) -> Batch | None:
    """A batch of a project, even if it was deleted."""
    return session.scalars(select(Batch).where(Batch.id == batch_id, Batch.project_id == project_id)).first()


def owner(session: Session, object_id: str) -> Owner | None:
    """Whose this file or batch is; None: there is none."""
    for kind, project in ((Kind.FILE, File), (Kind.BATCH, Batch)):
        project_id = session.scalar(select(project.project_id).where(project.id == object_id))
        if project_id is not None:
            return Owner(kind=kind, project_id=project_id)
    return None
