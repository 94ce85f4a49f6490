"""Routes of keys, for the admin key: create, list, revoke."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts import service
from batchsvc.accounts.caller import AdminDep
from batchsvc.accounts.schemas import CreateKey, key_object
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1/admin/keys")


@router.post("")
def create_key(admin: AdminDep, context: ContextDep, body: CreateKey) -> dict[str, Any]:
    """A new key; the field `key` holds its text this once."""
    with context.db.transaction() as session:
        project_id = admin.project_id if body.project is None else service.project_of(session, body.project)
        row, text = service.create_key(session, project_id, body.name, body.is_admin)
        return {**key_object(row), "key": text}


@router.get("")
def list_keys(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """All keys of all projects."""
    with context.db.reading() as session:
        return {"object": "list", "data": [key_object(row) for row in service.list_keys(session)]}


@router.delete("/{key_id}")
def revoke_key(_admin: AdminDep, context: ContextDep, key_id: str) -> dict[str, Any]:
    """End a key at once. Its row stays, because bills name it."""
    with context.db.transaction() as session:
        return key_object(service.revoke_key(session, key_id))
