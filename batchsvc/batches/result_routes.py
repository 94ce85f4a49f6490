"""Route of result lines, while a batch runs and after its end."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from batchsvc.accounts.caller import CallerDep
from batchsvc.batches import ordered_results, result_service
from batchsvc.batches.lifecycle import Status
from batchsvc.http.deps import ContextDep
from batchsvc.http.description import sends

router = APIRouter(prefix="/v1")


@router.get("/batches/{batch_id}/results", response_class=StreamingResponse, responses=sends("application/jsonl"))
def list_results(
    caller: CallerDep,
    context: ContextDep,
    batch_id: str,
    after: Annotated[str | None, Query(max_length=255)] = None,
    limit: Annotated[int | None, Query(ge=1, le=10_000_000)] = None,
    order: Literal["completion", "input"] = "completion",
) -> StreamingResponse:
    """The lines that are there, as JSONL: in order of completion, or of the input up to the first that isn't finished.

    Each has a `cursor`; `after` goes on behind it. The header X-Batch-Status tells the status: all is read when the
    batch has ended and an answer has no line.
    """
    store = context.store
    status: Status
    if order == "input":
        with context.db.snapshot() as session:
            found, place = ordered_results.look(session, caller.project_id, batch_id, after)
        status, body = found.status, ordered_results.lines(store, found, place, limit)
    else:
        with context.db.snapshot() as session:
            progress, cursor = result_service.look(session, caller.project_id, batch_id, after)
        status, body = progress.status, result_service.lines(store, progress, cursor, limit)
    return StreamingResponse(body, media_type="application/jsonl", headers={"X-Batch-Status": status})
