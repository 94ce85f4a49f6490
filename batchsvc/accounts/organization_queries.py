"""SQL of what an operator sees and changes: pages of projects, keys and service accounts."""

from __future__ import annotations

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from batchsvc import mode
from batchsvc.accounts.tables import ApiKey, Project, ServiceAccount
from batchsvc.db.keyset import Cursor, page


def project(session: Session, project_id: str, *, is_locked: bool = False) -> Project | None:
    """One project by its id; locked, though not against rows that refer to it, nobody else changes it meanwhile."""
    if not is_locked:
        return session.get(Project, project_id)
    return session.get(Project, project_id, with_for_update={"key_share": True}, populate_existing=True)


def project_page(
    session: Session, after: Cursor | None, limit: int, *, is_ascending: bool, with_archived: bool
) -> list[Project]:
    """Projects beyond a cursor."""
    found = select(Project).where(Project.id.not_like(mode.LIKE, escape="\\"))
    if not with_archived:
        found = found.where(Project.archived_ms.is_(None))
    return list(session.scalars(page(found, Project.created_ms, Project.id, after, limit, is_ascending)))


def key(session: Session, key_id: str, *, is_locked: bool = False) -> ApiKey | None:
    """One key by its public part; locked, it changes for nobody else till the transaction ends."""
    return session.get(ApiKey, key_id, with_for_update=is_locked or None, populate_existing=is_locked)


def key_page(
    session: Session, project_id: str | None, after: Cursor | None, limit: int, *, is_ascending: bool
) -> list[ApiKey]:
    """Keys of a project that weren't revoked, beyond a cursor; without a project, the admin keys of all."""
    found = select(ApiKey).where(ApiKey.revoked_ms.is_(None))
    if project_id is None:
        found = found.where(ApiKey.is_admin)
    else:
        found = found.where(ApiKey.project_id == project_id, ApiKey.is_admin.is_(False))
    return list(session.scalars(page(found, ApiKey.created_ms, ApiKey.id, after, limit, is_ascending)))


def working_admin_keys(session: Session, project_id: str, now_ms: int) -> list[ApiKey]:
    """Admin keys of a project that are neither revoked nor expired."""
    works = (ApiKey.revoked_ms.is_(None), or_(ApiKey.expires_ms.is_(None), ApiKey.expires_ms > now_ms))
    return list(session.scalars(select(ApiKey).where(ApiKey.project_id == project_id, ApiKey.is_admin, *works)))


def keys_of_account(session: Session, account_id: str) -> list[ApiKey]:
    """Keys of a service account that weren't revoked; found by its project, which has an index."""
    project_id = select(ServiceAccount.project_id).where(ServiceAccount.id == account_id).scalar_subquery()
    its = (ApiKey.service_account_id == account_id, ApiKey.revoked_ms.is_(None))
    return list(session.scalars(select(ApiKey).where(ApiKey.project_id == project_id, *its).order_by(ApiKey.id)))


def account(session: Session, account_id: str, *, is_locked: bool = False) -> ServiceAccount | None:
    """One service account, deleted or not; locked, it changes for nobody else till the transaction ends."""
    return session.get(ServiceAccount, account_id, with_for_update=is_locked or None, populate_existing=is_locked)


def accounts_by_id(session: Session, account_ids: set[str]) -> dict[str, ServiceAccount]:
    """Service accounts, deleted or not."""
    found = select(ServiceAccount).where(ServiceAccount.id.in_(account_ids))
    return {row.id: row for row in session.scalars(found)} if account_ids else {}


def account_page(
    session: Session, project_id: str, after: Cursor | None, limit: int, *, is_ascending: bool
) -> list[ServiceAccount]:
    """Service accounts of a project beyond a cursor."""
    found = select(ServiceAccount).where(ServiceAccount.project_id == project_id, ServiceAccount.deleted_ms.is_(None))
    created, key_column = ServiceAccount.created_ms, ServiceAccount.id
    return list(session.scalars(page(found, created, key_column, after, limit, is_ascending)))
