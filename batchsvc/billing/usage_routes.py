"""Routes of usage and costs, as the official client's `admin.organization.usage` calls them; for admin keys."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from batchsvc.accounts.caller import AdminDep
from batchsvc.billing import usage_service
from batchsvc.billing.usage import Kind
from batchsvc.http.deps import Context, ContextDep

router = APIRouter(prefix="/v1/organization")


@router.get("/usage/completions")
def completions(_admin: AdminDep, context: ContextDep, request: Request) -> dict[str, Any]:
    """Tokens of chat and text completions, by bucket."""
    return _answer(context, Kind.COMPLETIONS, request)


@router.get("/usage/embeddings")
def embeddings(_admin: AdminDep, context: ContextDep, request: Request) -> dict[str, Any]:
    """Tokens of embeddings, by bucket."""
    return _answer(context, Kind.EMBEDDINGS, request)


@router.get("/costs")
def costs(_admin: AdminDep, context: ContextDep, request: Request) -> dict[str, Any]:
    """What was charged, by day."""
    return _answer(context, Kind.COSTS, request)


def _answer(context: Context, kind: Kind, request: Request) -> dict[str, Any]:
    with context.db.reading() as session:
        return usage_service.answer(session, kind, request.query_params.multi_items())
