"""The route that shows an operator what the engine workers do."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from batchsvc.accounts.caller import AdminDep
from batchsvc.batches import worker_service
from batchsvc.http.deps import ContextDep

router = APIRouter(prefix="/v1/admin")


@router.get("/workers")
def list_workers(_admin: AdminDep, context: ContextDep) -> dict[str, Any]:
    """Engine workers that are alive: running and waiting requests by lane, KV and cache shares, speed."""
    with context.db.reading() as session:
        return worker_service.shown_workers(session, context.settings.renew_s)
