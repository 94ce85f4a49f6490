"""Route of the audit log, as the official client's `admin.organization.audit_logs` calls it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from batchsvc.accounts.caller import AdminDep
from batchsvc.audit import listing
from batchsvc.audit.queries import Filter
from batchsvc.errors import InvalidRequestError
from batchsvc.http.deps import ContextDep
from batchsvc.http.paging import array

router = APIRouter(prefix="/v1/organization")


def _at(name: str) -> Any:
    return Query(alias=f"effective_at[{name}]", ge=0, le=2**40)


@router.get("/audit_logs")
def list_audit_logs(
    _admin: AdminDep,
    context: ContextDep,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=listing.MOST)] = 20,
    after: Annotated[str | None, Query(max_length=255)] = None,
    before: Annotated[str | None, Query(max_length=255)] = None,
    gt: Annotated[int | None, _at("gt")] = None,
    gte: Annotated[int | None, _at("gte")] = None,
    lt: Annotated[int | None, _at("lt")] = None,
    lte: Annotated[int | None, _at("lte")] = None,
) -> dict[str, Any]:
    """Who changed what, newest first. Arrays: `event_types[]`, `actor_ids[]`, `project_ids[]`, `resource_ids[]`."""
    for unknown in ("actor_emails", "tenant_only"):
        if array(request, unknown) not in ([], ["false"]):
            raise InvalidRequestError(
                f"{unknown}: this service has neither users with addresses nor tenants of its own.",
                code="unknown_parameter",
                param=unknown,
            )
    first = [second for second in (gte, None if gt is None else gt + 1) if second is not None]
    end = [second for second in (lt, None if lte is None else lte + 1) if second is not None]
    wanted = Filter(
        actions=array(request, "event_types"),
        actor_ids=array(request, "actor_ids"),
        project_ids=array(request, "project_ids"),
        target_ids=array(request, "resource_ids"),
        from_ms=max(first) * 1000 if first else None,
        to_ms=min(end) * 1000 if end else None,
    )
    with context.db.reading() as session:
        return listing.page(session, wanted, limit=limit, after=after or None, before=before or None)
