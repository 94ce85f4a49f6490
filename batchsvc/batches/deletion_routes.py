"""Routes of deleting batches; and of an operator who deletes somebody's files or batches, which is audited."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts.caller import AdminDep, CallerDep
from batchsvc.batches import deletion_service
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1")


@router.delete("/batches/{batch_id}")
def delete_batch(caller: CallerDep, context: ContextDep, batch_id: str, *, input: bool = False) -> dict[str, Any]:
    """Delete an ended batch with its results and metadata, and with `input=true` its input. The bill stays."""
    with context.db.transaction() as session:
        row = deletion_service.delete_batch(
            session, caller.project_id, batch_id, with_input=input, discard=context.discard
        )
        return {"id": row.id, "object": "batch", "deleted": True}


@router.delete("/admin/content/{object_id}")
def delete_content(admin: AdminDep, context: ContextDep, object_id: str, *, input: bool = False) -> dict[str, Any]:
    """Delete a file or an ended batch of any project; with `input=true` a batch's input too."""
    with context.db.transaction() as session:
        return deletion_service.delete_any(session, admin.actor, object_id, with_input=input, discard=context.discard)
