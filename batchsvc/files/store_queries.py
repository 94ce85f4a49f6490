"""SQL of registered stores."""

from __future__ import annotations

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from batchsvc.files.tables import TenantStore


def store(session: Session, project_id: str, bucket: str, prefix: str) -> TenantStore | None:
    """The store that is registered under exactly this prefix, locked till the transaction ends."""
    found = select(TenantStore).where(
        TenantStore.project_id == project_id, TenantStore.bucket == bucket, TenantStore.prefix == prefix
    )
    return session.scalars(found.with_for_update()).first()


def of_bucket(session: Session, project_id: str, bucket: str) -> list[TenantStore]:
    """What a project may reach of a bucket."""
    found = select(TenantStore).where(TenantStore.project_id == project_id, TenantStore.bucket == bucket)
    return list(session.scalars(found.execution_options(populate_existing=True)))


def stores(session: Session) -> list[TenantStore]:
    """All stores of all projects, oldest first."""
    return list(session.scalars(select(TenantStore).order_by(TenantStore.created_ms, TenantStore.id)))


def remove(session: Session, store_id: str) -> bool:
    """Forget a store and its keys. False: there is none."""
    gone = delete(TenantStore).where(TenantStore.id == store_id).returning(TenantStore.id)
    return session.scalar(gone) is not None
