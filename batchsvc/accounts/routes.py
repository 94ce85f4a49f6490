"""Routes of keys and projects, for the admin key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts import service
from batchsvc.accounts.caller import AdminDep
from batchsvc.accounts.schemas import ChangeProject, CreateKey, key_object, project_object
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1/admin")


@router.post("/keys")
def create_key(admin: AdminDep, context: ContextDep, body: CreateKey) -> dict[str, Any]:
    """A new key; the field `key` holds its text this once."""
    with context.db.transaction() as session:
        project_id = admin.project_id if body.project is None else service.project_of(session, body.project)
        row, text = service.create_key(session, project_id, body.name, body.is_admin)
        return {**key_object(row), "key": text}


@router.get("/keys")
def list_keys(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """All keys of all projects."""
    with context.db.reading() as session:
        return {"object": "list", "data": [key_object(row) for row in service.list_keys(session)]}


@router.delete("/keys/{key_id}")
def revoke_key(_admin: AdminDep, context: ContextDep, key_id: str) -> dict[str, Any]:
    """End a key at once. Its row stays, because bills name it."""
    with context.db.transaction() as session:
        return key_object(service.revoke_key(session, key_id))


@router.get("/projects")
def list_projects(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """All projects with their weights, quotas and limits."""
    with context.db.reading() as session:
        return {"object": "list", "data": [project_object(row) for row in service.list_projects(session)]}


@router.post("/projects/{project}")
def change_project(_admin: AdminDep, context: ContextDep, project: str, body: ChangeProject) -> dict[str, Any]:
    """Change the weight, the quota or the limits of a project, given by its id or its name."""
    with context.db.transaction() as session:
        return project_object(service.change_project(session, project, body.model_dump(exclude_unset=True)))
