"""Routes of batches: create, retrieve, list, cancel; and one answer for the endpoints that only batches can reach."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query

from batchsvc import failpoints
from batchsvc.accounts.caller import CallerDep
from batchsvc.batches import service
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.schemas import CreateBatch
from batchsvc.errors import InvalidRequestError
from batchsvc.http.deps import ContextDep
from batchsvc.http.paging import PageArgs, page_args, page_object

router = APIRouter(prefix="/v1")
BatchPage = Annotated[PageArgs, Depends(page_args(default=20, most=100))]

BATCH_ONLY = ("/chat/completions", "/completions", "/embeddings", "/responses", "/moderations", "/images/generations")


@router.post("/batches")
def create_batch(
    caller: CallerDep,
    context: ContextDep,
    body: CreateBatch,
    x_stainless_retry_count: Annotated[str, Header()] = "0",
) -> dict[str, Any]:
    """Create a batch. Its planning is asked for after the commit; if that message is lost, the reaper asks again."""
    is_retry = x_stainless_retry_count.isdigit() and int(x_stainless_retry_count[:9]) > 0
    with context.db.transaction() as session:
        row = service.create_batch(session, caller, body, is_retry=is_retry)
        shown = service.show(session, [row], context.settings.renew_s)[0]
    if row.status == Status.VALIDATING:
        failpoints.reach("batch.created")
        context.dispatcher.plan(row.id)
        failpoints.reach("batch.hinted")
    return shown


@router.get("/batches")
def list_batches(
    caller: CallerDep,
    context: ContextDep,
    page: BatchPage,
    name: Annotated[str | None, Query(max_length=128)] = None,
) -> dict[str, Any]:
    """Batches of the project, newest first unless `order=asc`; `name` filters by the extension of create."""
    with context.db.reading() as session:
        found = service.list_batches(session, caller.project_id, page, name)
        return page_object(service.show(session, found, context.settings.renew_s), page.limit, dict)


@router.get("/batches/{batch_id}")
def retrieve_batch(caller: CallerDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """One batch."""
    with context.db.reading() as session:
        row = service.get(session, caller.project_id, batch_id)
        return service.show(session, [row], context.settings.renew_s)[0]


@router.post("/batches/{batch_id}/cancel")
def cancel_batch(caller: CallerDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """Cancel a batch."""
    with context.db.transaction() as session:
        row = service.cancel(session, caller.project_id, batch_id)
        shown = service.show(session, [row], context.settings.renew_s)[0]
    if row.status == Status.CANCELLING:
        context.dispatcher.finalize(row.id)
    return shown


def _batch_only(path: str) -> None:
    def answer(_caller: CallerDep) -> None:
        raise InvalidRequestError(
            f"/v1{path} is not answered directly: this service runs batches. Write one request a line as "
            f'{{"custom_id": "1", "method": "POST", "url": "{service.ENDPOINT}", "body": {{...}}}}, '
            "upload the file with POST /v1/files (purpose batch), then POST /v1/batches with its id.",
            code="batch_only",
        )

    router.add_api_route(path, answer, methods=["POST"], response_model=None)


for _path in BATCH_ONLY:
    _batch_only(_path)
