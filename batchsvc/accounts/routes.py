"""Routes of keys and projects in our own shapes, for the admin key: what OpenAI's shapes have no room for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts import administration, key_administration, service
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
    with context.db.transaction() as session:
        project_id = admin.project_id
        if body.project is not None:
            project_id = administration.project_of(session, admin.actor, body.project)
        row, text = key_administration.create_key(
            session,
            admin.actor,
            project_id,
            body.name,
            is_admin=body.is_admin,
            wanted=body.scopes,
            expires_in_s=body.expires_in_seconds,
        )
        return {**key_object(row), "key": text}


@router.get("/keys")
def list_keys(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """All keys of all projects."""
    with context.db.reading() as session:
        return {"object": "list", "data": [key_object(row) for row in service.list_keys(session)]}


@router.post("/keys/{key_id}")
def change_key(admin: AdminDep, context: ContextDep, key_id: str, body: ChangeKeyAndLimits) -> dict[str, Any]:
    """Change the scopes, the expiry or the limits of a key that works."""
    with context.db.transaction() as session:
        row = key_administration.get_key(session, key_id)
        changes = body.model_dump(exclude_unset=True)
        return key_object(key_administration.change_key(session, admin.actor, row, changes))


@router.post("/keys/{key_id}/rotate")
def rotate_key(admin: AdminDep, context: ContextDep, key_id: str, body: RotateKey) -> dict[str, Any]:
    """A successor of a key, whose text is in `key` this once; the old key works on for the overlap."""
    with context.db.transaction() as session:
        old = key_administration.get_key(session, key_id)
        row, text = key_administration.rotate_key(session, admin.actor, old, body.overlap_seconds)
        return {**key_object(row), "key": text, "replaces": key_object(old)}


@router.delete("/keys/{key_id}")
def revoke_key(admin: AdminDep, context: ContextDep, key_id: str) -> dict[str, Any]:
    """End a key at once. Its row stays, because bills name it."""
    with context.db.transaction() as session:
        return key_object(key_administration.revoke_key(session, admin.actor, key_id))


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
