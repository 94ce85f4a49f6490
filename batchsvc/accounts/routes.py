"""Routes of keys and projects in our own shapes, for the admin key: what OpenAI's shapes have no room for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts import administration, keys_api, service
from batchsvc.accounts.caller import AdminDep
from batchsvc.accounts.schemas import (
    ChangeKeyAndLimits,
    ChangeProject,
    CreateKey,
    RotateKey,
    key_object,
    project_object,
)
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1/admin")


@router.post("/keys")
def create_key(admin: AdminDep, context: ContextDep, body: CreateKey) -> dict[str, Any]:
    """A new key; the field `key` holds its text this once."""
    own = admin.project_id
    return context.db.once(lambda session: keys_api.create(session, admin.actor, body, own_project_id=own))


@router.get("/keys")
def list_keys(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """All keys of all projects."""
    with context.db.reading() as session:
        return {"object": "list", "data": [key_object(row) for row in service.list_keys(session)]}


@router.post("/keys/{key_id}")
def change_key(admin: AdminDep, context: ContextDep, key_id: str, body: ChangeKeyAndLimits) -> dict[str, Any]:
    """Change the scopes, the expiry or the limits of a key that works."""
    return context.db.once(lambda session: keys_api.change(session, admin.actor, key_id, body))


@router.post("/keys/{key_id}/rotate")
def rotate_key(admin: AdminDep, context: ContextDep, key_id: str, body: RotateKey) -> dict[str, Any]:
    """A successor of a key, whose text is in `key` this once; the old key works on for the overlap."""
    return context.db.once(lambda session: keys_api.rotate(session, admin.actor, key_id, body))


@router.delete("/keys/{key_id}")
def revoke_key(admin: AdminDep, context: ContextDep, key_id: str) -> dict[str, Any]:
    """End a key at once. Its row stays, because bills name it."""
    return context.db.once(lambda session: keys_api.revoke(session, admin.actor, key_id))


@router.get("/projects")
def list_projects(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """All projects with their weights, quotas and limits."""
    with context.db.reading() as session:
        return {"object": "list", "data": [project_object(row) for row in service.list_projects(session)]}


@router.post("/projects/{project}")
def change_project(admin: AdminDep, context: ContextDep, project: str, body: ChangeProject) -> dict[str, Any]:
    """Change the weight, the quota or the limits of a project, given by its id or its name."""
    with context.db.transaction() as session:
        changes = body.model_dump(exclude_unset=True)
        return project_object(administration.change_project(session, admin.actor, project, changes))
