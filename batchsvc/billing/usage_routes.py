"""Routes of usage and costs, as the official client's `admin.organization.usage` calls them: for admins, and tests."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from batchsvc import mode
from batchsvc.accounts.caller import CallerDep, require_admin
from batchsvc.accounts.service import Caller
from batchsvc.billing import usage_service
from batchsvc.billing.usage import FILTERS, GROUPS, WIDTHS, Kind
from batchsvc.http.deps import Context, ContextDep

router = APIRouter(prefix="/v1/organization")


def _asker(caller: CallerDep) -> Caller:
    """An operator, or whoever has a test key and asks about their own tests."""
    return caller if mode.is_test(caller.project_id) else require_admin(caller)


AskerDep = Annotated[Caller, Depends(_asker)]


def _takes(kind: Kind) -> dict[str, Any]:
    """What the description has to say of a question, which is read from the URL in both forms of arrays."""
    widths, time = WIDTHS[kind], {"type": "integer", "minimum": 0}
    most = max(width.most for width in widths.values())
    single: dict[str, dict[str, Any]] = {
        "start_time": time,
        "end_time": time,
        "bucket_width": {"enum": list(widths)},
        "limit": {"type": "integer", "minimum": 1, "maximum": most},
        "page": {"type": "string"},
    }
    arrays = {name: {"type": "string"} for name in FILTERS[kind]} | {"group_by": {"enum": list(GROUPS[kind])}}
    many = {f"{name}[]": {"type": "array", "items": one} for name, one in arrays.items()}
    return {
        "parameters": [
            {"name": name, "in": "query", "required": name == "start_time", "schema": schema}
            for name, schema in (single | many).items()
        ]
    }


@router.get("/usage/completions", openapi_extra=_takes(Kind.COMPLETIONS))
def completions(asker: AskerDep, context: ContextDep, request: Request) -> dict[str, Any]:
    """Tokens of chat and text completions, by bucket."""
    return _answer(asker, context, Kind.COMPLETIONS, request)


@router.get("/usage/embeddings", openapi_extra=_takes(Kind.EMBEDDINGS))
def embeddings(asker: AskerDep, context: ContextDep, request: Request) -> dict[str, Any]:
    """Tokens of embeddings, by bucket."""
    return _answer(asker, context, Kind.EMBEDDINGS, request)


@router.get("/costs", openapi_extra=_takes(Kind.COSTS))
def costs(asker: AskerDep, context: ContextDep, request: Request) -> dict[str, Any]:
    """What was charged, by day."""
    return _answer(asker, context, Kind.COSTS, request)


def _answer(asker: Caller, context: Context, kind: Kind, request: Request) -> dict[str, Any]:
    own = asker.project_id if mode.is_test(asker.project_id) else None
    with context.db.reading() as session:
        return usage_service.answer(session, kind, request.query_params.multi_items(), test_project_id=own)
