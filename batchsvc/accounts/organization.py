"""Projects, keys, service accounts and limits as an operator sees and changes them: what the routes of
`/v1/organization` and the commands on a database share. Checked bodies in, the API's objects out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from sqlalchemy.orm import Session

from batchsvc.accounts import administration, key_administration
from batchsvc.accounts import organization_queries as queries
from batchsvc.accounts import organization_schemas as schemas
from batchsvc.accounts.limits import Limits
from batchsvc.accounts.organization_schemas import (
    ChangeKey,
    ChangeLimits,
    ChangeServiceAccount,
    CreateAdminKey,
    CreateProject,
    CreateServiceAccount,
    CreateServiceAccountKey,
    RenameProject,
)
from batchsvc.accounts.service import limits_of
from batchsvc.accounts.tables import ApiKey
from batchsvc.audit.actor import Actor
from batchsvc.db.keyset import Cursor
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.http.paging import PageArgs, page_object

_KEY = "organization.project.api_key"
_ACCOUNT = "organization.project.service_account"
_ADMIN_KEY = "organization.admin_api_key"
_OF_LIMITS = {
    "max_requests_per_1_minute": "requests_per_minute",
    "max_open_batches": "max_open_batches",
    "max_stored_bytes": "max_stored_bytes",
}


class _Dated(Protocol):
    id: Any
    created_ms: Any


R = TypeVar("R", bound=_Dated)


# ---- projects


def list_projects(session: Session, page: PageArgs, *, with_archived: bool) -> dict[str, Any]:
    """Projects, page by page."""
    after = _cursor(page, queries.project(session, page.after) if page.after else None)
    found = queries.project_page(
        session, after, page.limit + 1, is_ascending=page.is_ascending, with_archived=with_archived
    )
    return page_object(found, page.limit, schemas.project_object)


def show_project(session: Session, project_id: str) -> dict[str, Any]:
    """One project, archived or not."""
    return schemas.project_object(administration.get_project(session, project_id))


def create_project(session: Session, actor: Actor, body: CreateProject) -> dict[str, Any]:
    """A new project."""
    return schemas.project_object(administration.create_project(session, actor, body.name))


def rename_project(session: Session, actor: Actor, project_id: str, body: RenameProject) -> dict[str, Any]:
    """Another name for a project."""
    row = administration.active_project(session, project_id)
    return schemas.project_object(administration.change_project(session, actor, row.id, {"name": body.name}))


def archive_project(session: Session, actor: Actor, project_id: str) -> dict[str, Any]:
    """The end of a project; again changes nothing."""
    return schemas.project_object(administration.archive_project(session, actor, project_id))


# ---- keys of projects


def list_keys(session: Session, project_id: str, page: PageArgs, access: str | None) -> dict[str, Any]:
    """Keys of a project that weren't revoked; `access` filters by whether their owners may use it."""
    project = administration.get_project(session, project_id)
    after = _cursor(page, queries.key(session, page.after) if page.after else None)
    found = queries.key_page(session, project.id, after, page.limit + 1, is_ascending=page.is_ascending)
    is_active = project.archived_ms is None
    if (access == "active" and not is_active) or (access == "inactive" and is_active):
        found = []  # keys of deleted service accounts are revoked, so all keys have the access of their project
    owners = _owners(session, found)
    return page_object(found, page.limit, lambda row: schemas.project_key_object(row, project, owners))


def show_key(session: Session, project_id: str, key_id: str) -> dict[str, Any]:
    """One key of a project."""
    project = administration.get_project(session, project_id)
    row = key_administration.get_key(session, key_id, project_id=project.id, is_admin=False)
    return schemas.project_key_object(row, project, _owners(session, [row]))


def change_key(session: Session, actor: Actor, project_id: str, key_id: str, body: ChangeKey) -> dict[str, Any]:
    """Other scopes or another expiry for a key."""
    project = administration.active_project(session, project_id)
    row = key_administration.get_key(session, key_id, project_id=project.id, is_admin=False)
    key_administration.change_key(session, actor, row, body.model_dump(exclude_unset=True))
    return schemas.project_key_object(row, project, _owners(session, [row]))


def delete_key(session: Session, actor: Actor, project_id: str, key_id: str) -> dict[str, Any]:
    """The end of a key."""
    row = key_administration.get_key(session, key_id, project_id=project_id, is_admin=False)
    key_administration.revoke_key(session, actor, row.id)
    return schemas.deleted_object(row.id, _KEY)


# ---- service accounts


def list_accounts(session: Session, project_id: str, page: PageArgs) -> dict[str, Any]:
    """Service accounts of a project."""
    project = administration.get_project(session, project_id)
    after = _cursor(page, queries.account(session, page.after) if page.after else None)
    found = queries.account_page(session, project.id, after, page.limit + 1, is_ascending=page.is_ascending)
    return page_object(found, page.limit, schemas.account_object)


def show_account(session: Session, project_id: str, account_id: str) -> dict[str, Any]:
    """One service account."""
    return schemas.account_object(key_administration.get_account(session, project_id, account_id))


def create_account(session: Session, actor: Actor, project_id: str, body: CreateServiceAccount) -> dict[str, Any]:
    """A new service account, with a key unless it is wanted alone."""
    is_alone = bool(body.create_service_account_only)
    if is_alone and body.expires_in_seconds is not None:
        raise InvalidRequestError(
            "expires_in_seconds is of a key, and create_service_account_only makes none: leave one of them out.",
            code="invalid_value",
            param="expires_in_seconds",
        )
    role = key_administration.NONE if is_alone else key_administration.MEMBER
    made = key_administration.create_account(session, actor, project_id, body.name, role)
    if is_alone:
        return {**schemas.account_object(made), "api_key": None}
    key = key_administration.create_account_key(session, actor, made, None, expires_in_s=body.expires_in_seconds)
    return {**schemas.account_object(made), "api_key": schemas.account_key_object(key)}


def change_account(
    session: Session, actor: Actor, project_id: str, account_id: str, body: ChangeServiceAccount
) -> dict[str, Any]:
    """Another name or role for a service account."""
    row = key_administration.get_account(session, project_id, account_id)
    changes = body.model_dump(exclude_unset=True)
    return schemas.account_object(key_administration.change_account(session, actor, row, changes))


def delete_account(session: Session, actor: Actor, project_id: str, account_id: str) -> dict[str, Any]:
    """The end of a service account and its keys."""
    row = key_administration.get_account(session, project_id, account_id)
    key_administration.delete_account(session, actor, row)
    return schemas.deleted_object(row.id, _ACCOUNT)


def create_account_key(
    session: Session, actor: Actor, project_id: str, account_id: str, body: CreateServiceAccountKey
) -> dict[str, Any]:
    """Another key of a service account."""
    row = key_administration.get_account(session, project_id, account_id)
    made = key_administration.create_account_key(
        session, actor, row, body.name, wanted=body.scopes, expires_in_s=body.expires_in_seconds
    )
    return schemas.account_key_object(made)


# ---- admin keys


def list_admin_keys(session: Session, page: PageArgs) -> dict[str, Any]:
    """Admin keys of all projects."""
    after = _cursor(page, queries.key(session, page.after) if page.after else None)
    found = queries.key_page(session, None, after, page.limit + 1, is_ascending=page.is_ascending)
    return page_object(found, page.limit, lambda row: _admin_key(session, row))


def show_admin_key(session: Session, key_id: str) -> dict[str, Any]:
    """One admin key."""
    return _admin_key(session, key_administration.get_key(session, key_id, is_admin=True))


def create_admin_key(session: Session, actor: Actor, project_id: str, body: CreateAdminKey) -> dict[str, Any]:
    """A new admin key, which belongs to a project as every key does; `value` is its text."""
    row, text = key_administration.create_key(
        session,
        actor,
        project_id,
        body.name,
        is_admin=True,
        wanted=body.scopes,
        expires_in_s=body.expires_in_seconds,
    )
    return {**_admin_key(session, row), "value": text}


def delete_admin_key(session: Session, actor: Actor, key_id: str) -> dict[str, Any]:
    """The end of an admin key; not of the one that asks, so that somebody is left who can."""
    row = key_administration.get_key(session, key_id, is_admin=True)
    if row.id == actor.id:
        raise InvalidRequestError(
            f"{key_id} makes this call: delete it with another admin key.", code="key_in_use", param="key_id"
        )
    key_administration.revoke_key(session, actor, row.id)
    return schemas.deleted_object(row.id, _ADMIN_KEY)


# ---- limits


def list_limits(session: Session, project_id: str, default: Limits) -> dict[str, Any]:
    """What holds for a project, in one row: our limits count all models together."""
    limits = limits_of(administration.get_project(session, project_id)).or_else(default)
    return page_object([limits], 1, schemas.rate_limit_object)


def change_limits(
    session: Session, actor: Actor, project_id: str, limit_id: str, body: ChangeLimits, default: Limits
) -> dict[str, Any]:
    """Other limits for a project."""
    row = administration.active_project(session, project_id)
    if limit_id != schemas.RATE_LIMIT_ID:
        raise NotFoundError(
            f"There is no rate limit {limit_id[:64]}: {schemas.RATE_LIMIT_ID} is the one that a project has.",
            param="rate_limit_id",
        )
    changes = {_OF_LIMITS[name]: value for name, value in body.model_dump(exclude_unset=True).items()}
    administration.change_project(session, actor, row.id, changes)
    return schemas.rate_limit_object(limits_of(row).or_else(default))


def _admin_key(session: Session, row: ApiKey) -> dict[str, Any]:
    return schemas.admin_key_object(row, administration.get_project(session, row.project_id))


def _owners(session: Session, rows: Sequence[ApiKey]) -> dict[str, Any]:
    return queries.accounts_by_id(session, {row.service_account_id for row in rows if row.service_account_id})


def _cursor(page: PageArgs, row: R | None) -> Cursor | None:
    if page.after is None:
        return None
    found = page.known(row)
    return Cursor(found.created_ms, found.id)
