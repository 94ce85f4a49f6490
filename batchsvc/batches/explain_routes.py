"""Routes that explain a bill: a line, a batch, and for operators what its engine did for it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts.caller import AdminDep, CallerDep
from batchsvc.batches import explain_service
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1")


@router.get("/batches/{batch_id}/lines/{custom_id:path}")
def explain_line(caller: CallerDep, context: ContextDep, batch_id: str, custom_id: str) -> dict[str, Any]:
    """Why a line costs what it costs."""
    return explain_service.explain_line(context.db, context.store, caller.project_id, batch_id, custom_id)


@router.get("/batches/{batch_id}/explanation")
def explain_batch(caller: CallerDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """What a batch costs, by kind of token."""
    with context.db.reading() as session:
        return explain_service.explain_batch(session, context.settings, caller.project_id, batch_id)


@router.get("/admin/batches/{batch_id}/explanation")
def explain_batch_to_operator(_admin: AdminDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """The same of any project's batch, with what its engine did and the margin that leaves."""
    with context.db.reading() as session:
        return explain_service.explain_batch(session, context.settings, None, batch_id)


@router.get("/admin/batches/{batch_id}/lines/{custom_id:path}")
def explain_line_to_operator(_admin: AdminDep, context: ContextDep, batch_id: str, custom_id: str) -> dict[str, Any]:
    """Why a line of any project's batch costs what it costs."""
    return explain_service.explain_line(context.db, context.store, None, batch_id, custom_id)
