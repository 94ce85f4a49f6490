"""Routes of projects, keys, service accounts and limits, as the official client's `admin.organization` calls them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends

from batchsvc.accounts import organization
from batchsvc.accounts.caller import AdminDep
from batchsvc.accounts.door import default_limits
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
from batchsvc.http.deps import ContextDep
from batchsvc.http.paging import PageArgs, page_args

router = APIRouter(prefix="/v1/organization")
Page = Annotated[PageArgs, Depends(page_args(default=20, most=100))]
_PROJECT = "/projects/{project_id}"
_KEY = _PROJECT + "/api_keys/{api_key_id}"
_ACCOUNT = _PROJECT + "/service_accounts/{service_account_id}"
_ADMIN_KEY = "/admin_api_keys/{key_id}"


@router.get("/projects")
def list_projects(_admin: AdminDep, context: ContextDep, page: Page, include_archived: bool = False) -> dict[str, Any]:
    """Projects, newest first unless `order=asc`."""
    with context.db.reading() as session:
        return organization.list_projects(session, page, with_archived=include_archived)


@router.post("/projects")
def create_project(admin: AdminDep, context: ContextDep, body: CreateProject) -> dict[str, Any]:
    """A new project."""
    return context.db.once(lambda session: organization.create_project(session, admin.actor, body))


@router.get(_PROJECT)
def retrieve_project(_admin: AdminDep, context: ContextDep, project_id: str) -> dict[str, Any]:
    """One project, archived or not."""
    with context.db.reading() as session:
        return organization.show_project(session, project_id)


@router.post(_PROJECT)
def rename_project(admin: AdminDep, context: ContextDep, project_id: str, body: RenameProject) -> dict[str, Any]:
    """Another name for a project."""
    return context.db.once(lambda session: organization.rename_project(session, admin.actor, project_id, body))


@router.post(_PROJECT + "/archive")
def archive_project(admin: AdminDep, context: ContextDep, project_id: str) -> dict[str, Any]:
    """End a project: its keys are refused, and batches that it has run to their end."""
    return context.db.once(lambda session: organization.archive_project(session, admin.actor, project_id))


@router.get(_PROJECT + "/api_keys")
def list_keys(
    _admin: AdminDep,
    context: ContextDep,
    page: Page,
    project_id: str,
    owner_project_access: Literal["active", "inactive", "any"] | None = None,
) -> dict[str, Any]:
    """Keys of a project that weren't revoked, without admin keys."""
    with context.db.reading() as session:
        return organization.list_keys(session, project_id, page, owner_project_access)


@router.get(_KEY)
def retrieve_key(_admin: AdminDep, context: ContextDep, project_id: str, api_key_id: str) -> dict[str, Any]:
    """One key of a project."""
    with context.db.reading() as session:
        return organization.show_key(session, project_id, api_key_id)


@router.post(_KEY)
def change_key(
    admin: AdminDep, context: ContextDep, project_id: str, api_key_id: str, body: ChangeKey
) -> dict[str, Any]:
    """Other scopes or another expiry for a key."""
    return context.db.once(lambda session: organization.change_key(session, admin.actor, project_id, api_key_id, body))


@router.delete(_KEY)
def delete_key(admin: AdminDep, context: ContextDep, project_id: str, api_key_id: str) -> dict[str, Any]:
    """End a key at once."""
    return context.db.once(lambda session: organization.delete_key(session, admin.actor, project_id, api_key_id))


@router.get(_PROJECT + "/service_accounts")
def list_accounts(_admin: AdminDep, context: ContextDep, page: Page, project_id: str) -> dict[str, Any]:
    """Service accounts of a project."""
    with context.db.reading() as session:
        return organization.list_accounts(session, project_id, page)


@router.post(_PROJECT + "/service_accounts")
def create_account(admin: AdminDep, context: ContextDep, project_id: str, body: CreateServiceAccount) -> dict[str, Any]:
    """A new service account, with a key whose text is shown this once."""
    return context.db.once(lambda session: organization.create_account(session, admin.actor, project_id, body))


@router.get(_ACCOUNT)
def retrieve_account(_admin: AdminDep, context: ContextDep, project_id: str, service_account_id: str) -> dict[str, Any]:
    """One service account."""
    with context.db.reading() as session:
        return organization.show_account(session, project_id, service_account_id)


@router.post(_ACCOUNT)
def change_account(
    admin: AdminDep, context: ContextDep, project_id: str, service_account_id: str, body: ChangeServiceAccount
) -> dict[str, Any]:
    """Another name or role for a service account."""
    return context.db.once(
        lambda session: organization.change_account(session, admin.actor, project_id, service_account_id, body)
    )


@router.delete(_ACCOUNT)
def delete_account(admin: AdminDep, context: ContextDep, project_id: str, service_account_id: str) -> dict[str, Any]:
    """End a service account and all of its keys at once."""
    return context.db.once(
        lambda session: organization.delete_account(session, admin.actor, project_id, service_account_id)
    )


@router.post(_ACCOUNT + "/api_keys")
def create_account_key(
    admin: AdminDep, context: ContextDep, project_id: str, service_account_id: str, body: CreateServiceAccountKey
) -> dict[str, Any]:
    """Another key of a service account; `value` is its text, shown this once."""
    return context.db.once(
        lambda session: organization.create_account_key(session, admin.actor, project_id, service_account_id, body)
    )


@router.get(_PROJECT + "/rate_limits")
def list_limits(_admin: AdminDep, context: ContextDep, project_id: str) -> dict[str, Any]:
    """What holds for a project, in one row; a limit that there isn't is shown as 2**53 - 1."""
    with context.db.reading() as session:
        return organization.list_limits(session, project_id, default_limits(context.settings))


@router.post(_PROJECT + "/rate_limits/{rate_limit_id}")
def change_limits(
    admin: AdminDep, context: ContextDep, project_id: str, rate_limit_id: str, body: ChangeLimits
) -> dict[str, Any]:
    """Other limits for a project."""
    default = default_limits(context.settings)
    return context.db.once(
        lambda session: organization.change_limits(session, admin.actor, project_id, rate_limit_id, body, default)
    )


@router.get("/admin_api_keys")
def list_admin_keys(_admin: AdminDep, context: ContextDep, page: Page) -> dict[str, Any]:
    """Admin keys of all projects."""
    with context.db.reading() as session:
        return organization.list_admin_keys(session, page)


@router.post("/admin_api_keys")
def create_admin_key(admin: AdminDep, context: ContextDep, body: CreateAdminKey) -> dict[str, Any]:
    """A new admin key, in the project of the key that asks; `value` is its text, shown this once."""
    return context.db.once(lambda session: organization.create_admin_key(session, admin.actor, admin.project_id, body))


@router.get(_ADMIN_KEY)
def retrieve_admin_key(_admin: AdminDep, context: ContextDep, key_id: str) -> dict[str, Any]:
    """One admin key."""
    with context.db.reading() as session:
        return organization.show_admin_key(session, key_id)


@router.delete(_ADMIN_KEY)
def delete_admin_key(admin: AdminDep, context: ContextDep, key_id: str) -> dict[str, Any]:
    """End an admin key at once; not the one that asks."""
    return context.db.once(lambda session: organization.delete_admin_key(session, admin.actor, key_id))
