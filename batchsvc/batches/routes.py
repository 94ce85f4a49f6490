"""Routes of batches: create, retrieve, list, cancel; and one answer for the endpoints that only batches can reach."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy.orm import Session

from batchsvc import failpoints, ids, tracing
from batchsvc.accounts import idempotency
from batchsvc.accounts.caller import CallerDep
from batchsvc.accounts.door import default_limits
from batchsvc.accounts.idempotency import ArrivalDep, RepetitionDep, Sent
from batchsvc.batches import inputs, service, traces
from batchsvc.batches.estimate import Habits
from batchsvc.batches.inputs import NewInput
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.message_body import MESSAGES
from batchsvc.batches.offpeak import Night
from batchsvc.batches.schemas import CreateBatch
from batchsvc.batches.tables import Batch
from batchsvc.clock import now_ns
from batchsvc.errors import InvalidRequestError
from batchsvc.files import stored_limit
from batchsvc.files.request_object import request_object
from batchsvc.http.bodies import described, json_body
from batchsvc.http.deps import Context, ContextDep
from batchsvc.http.paging import PageArgs, page_args, page_object

router = APIRouter(prefix="/v1")
BatchPage = Annotated[PageArgs, Depends(page_args(default=20, most=100))]

BATCH_ONLY = ("/embeddings", "/moderations", "/images/generations")


@router.post("/batches", openapi_extra=described(CreateBatch))
def create_batch(
    caller: CallerDep,
    context: ContextDep,
    arrived_ms: ArrivalDep,
    body: Annotated[CreateBatch, Depends(json_body(CreateBatch, request_object))],
    repetition: RepetitionDep,
) -> dict[str, Any]:
    """Create a batch. Its planning is asked for after the commit; if that message is lost, the reaper asks again."""
    batch_id, began_ns = ids.batch_id(), now_ns()
    if body.endpoint == MESSAGES:
        raise InvalidRequestError(
            f"endpoint: batches of {MESSAGES} are created with POST {MESSAGES}/batches.",
            code="invalid_value",
            param="endpoint",
        )

    def create(session: Session, given: NewInput | None) -> dict[str, Any]:
        call = body
        if given is not None:
            file = given.record(session, is_retry=repetition.is_retry)
            stored_limit.count(session, caller, file, default_limits(context.settings))
            call = body.model_copy(update={"input_file_id": file.id})
        row = service.create_batch(
            session, caller, call, context.settings, batch_id=batch_id, is_retry=repetition.is_retry
        )
        return _shown(session, context, [row])[0]

    with inputs.opened(context, caller, body) as given:
        digest = idempotency.digest_of(body.model_dump())  # before the transaction: there may be many requests
        sent = Sent(repetition=repetition, api_key_id=caller.api_key_id, digest=digest, arrived_ms=arrived_ms)
        shown = context.db.run(
            lambda session: idempotency.once_sent(
                session,
                caller.project_id,
                "batches",
                sent,
                partial(create, session, given),
                is_there=lambda answer: service.is_there(session, caller.project_id, answer["id"]),
            )
        )
    if given is not None and shown["input_file_id"] != given.file_id:
        given.forget()
    elif given is not None:
        tracing.uploaded(given.file_id, began_ns=began_ns)
    if shown["id"] == batch_id:
        traces.created(batch_id, shown["input_file_id"], began_ns=began_ns)
    failpoints.reach("batch.created")
    if shown["status"] == Status.VALIDATING:
        context.dispatcher.plan(shown["id"])
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
        return page_object(_shown(session, context, found), page.limit, dict)


@router.get("/batches/{batch_id}")
def retrieve_batch(caller: CallerDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """One batch."""
    with context.db.reading() as session:
        row = service.get(session, caller.project_id, batch_id)
        return _shown(session, context, [row])[0]


@router.post("/batches/{batch_id}/cancel")
def cancel_batch(caller: CallerDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """Cancel a batch. Cancelling again changes nothing; a batch that has ended otherwise is refused."""

    def cancel(session: Session) -> dict[str, Any]:
        return _shown(session, context, [service.cancel(session, caller.project_id, batch_id)])[0]

    shown = context.db.run(cancel)
    if shown["status"] == Status.CANCELLING:
        context.dispatcher.finalize(batch_id)
    return shown


def _shown(session: Session, context: Context, rows: Sequence[Batch]) -> list[dict[str, Any]]:
    settings = context.settings
    habits = Habits.from_settings(settings)
    return service.show(session, rows, settings.renew_s, Night.from_settings(settings), habits)


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
