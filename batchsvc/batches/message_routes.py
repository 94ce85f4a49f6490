"""Routes of message batches, as Anthropic's client calls them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from batchsvc import ids, tracing
from batchsvc.accounts import idempotency
from batchsvc.accounts.caller import CallerDep
from batchsvc.accounts.door import default_limits
from batchsvc.accounts.idempotency import ArrivalDep, RepetitionDep, Sent
from batchsvc.batches import inputs, line_set, message_intake, message_results, message_service, service, traces
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.message_body import MESSAGES
from batchsvc.batches.message_schemas import CreateMessageBatch
from batchsvc.batches.message_service import Results
from batchsvc.clock import now_ns
from batchsvc.errors import InvalidRequestError, NotFoundError, UnavailableError
from batchsvc.files import stored_limit
from batchsvc.files.tables import File
from batchsvc.http.bodies import described
from batchsvc.http.deps import Context, ContextDep
from batchsvc.http.description import sends

router = APIRouter(prefix=MESSAGES)


@router.post("")
def create_message(_caller: CallerDep) -> None:
    """Refused: this service runs batches."""
    raise InvalidRequestError(
        "A message is not answered directly: this service runs batches. Send it as "
        '{"requests": [{"custom_id": "1", "params": {...}}]} to POST /v1/messages/batches.',
        code="batch_only",
    )


@router.post("/batches", openapi_extra=described(CreateMessageBatch))
async def create_batch(
    request: Request, caller: CallerDep, context: ContextDep, arrived_ms: ArrivalDep, repetition: RepetitionDep
) -> dict[str, Any]:
    """Create a message batch of the requests in the call, which may be large: they are stored as they come."""
    began_ns = now_ns()
    given, num_requests = await message_intake.received(request, context, caller.project_id)
    batch_id = ids.message_batch_id()
    digest = given.stored.sha256  # the same requests are the same lines
    sent = Sent(repetition=repetition, api_key_id=caller.api_key_id, digest=digest, arrived_ms=arrived_ms)

    def create(session: Session) -> dict[str, Any]:
        file = given.record(session, is_retry=repetition.is_retry)
        stored_limit.count(session, caller, file, default_limits(context.settings))
        row = message_service.create(
            session,
            caller,
            context.settings,
            file_id=file.id,
            num_requests=num_requests,
            batch_id=batch_id,
            is_retry=repetition.is_retry,
        )
        return {"file_id": file.id, **_shown(session, context, request, [row])[0]}

    def make() -> dict[str, Any]:
        with inputs.deleted_if_refused(context.store, given.s3_key):
            made = context.db.run(
                lambda session: idempotency.once_sent(
                    session,
                    caller.project_id,
                    "messages",
                    sent,
                    partial(create, session),
                    is_there=lambda answer: service.is_there(session, caller.project_id, answer["id"]),
                )
            )
        if made.pop("file_id") != given.file_id:
            given.forget()
        else:
            tracing.uploaded(given.file_id, began_ns=began_ns)
            traces.created(made["id"], given.file_id, began_ns=began_ns)
        context.dispatcher.plan(made["id"])
        return made

    return await run_in_threadpool(make)


@router.get("/batches")
def list_batches(
    request: Request,
    caller: CallerDep,
    context: ContextDep,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after_id: Annotated[str | None, Query(max_length=255)] = None,
    before_id: Annotated[str | None, Query(max_length=255)] = None,
) -> dict[str, Any]:
    """Message batches of the project, newest first: those after `after_id`, which are older, or before `before_id`."""
    with context.db.reading() as session:
        rows, has_more = message_service.list_batches(
            session, caller.project_id, limit=limit, after_id=after_id, before_id=before_id
        )
        data = _shown(session, context, request, rows)
    return {
        "data": data,
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


@router.get("/batches/{message_batch_id}")
def retrieve_batch(request: Request, caller: CallerDep, context: ContextDep, message_batch_id: str) -> dict[str, Any]:
    """One message batch."""
    with context.db.reading() as session:
        row = message_service.get(session, caller.project_id, message_batch_id)
        return _shown(session, context, request, [row])[0]


@router.post("/batches/{message_batch_id}/cancel")
def cancel_batch(request: Request, caller: CallerDep, context: ContextDep, message_batch_id: str) -> dict[str, Any]:
    """Cancel a message batch; what is finished is delivered. Again, it changes nothing."""

    def cancel(session: Session) -> tuple[str, dict[str, Any]]:
        message_service.get(session, caller.project_id, message_batch_id)
        row = service.cancel(session, caller.project_id, message_batch_id)
        return row.status, _shown(session, context, request, [row])[0]

    status, shown = context.db.run(cancel)
    if status == Status.CANCELLING:
        context.dispatcher.finalize(message_batch_id)
    return shown


@router.delete("/batches/{message_batch_id}")
def delete_batch(caller: CallerDep, context: ContextDep, message_batch_id: str) -> dict[str, Any]:
    """Delete a message batch that has ended, with its requests and results."""
    with context.db.transaction() as session:
        row = message_service.delete(session, caller.project_id, message_batch_id, discard=context.discard)
        return {"id": row.id, "type": "message_batch_deleted"}


@router.get(
    "/batches/{message_batch_id}/results",
    response_class=StreamingResponse,
    responses=sends("application/x-jsonl"),
)
def batch_results(caller: CallerDep, context: ContextDep, message_batch_id: str) -> StreamingResponse:
    """The results of an ended batch as JSONL: one line for each of its requests, whatever became of it."""
    with context.db.reading() as session:
        found = message_service.results(session, caller.project_id, message_batch_id)
    lines = _results(context, found)
    first = next(lines, b"")  # while an error can still be answered
    return StreamingResponse(chain([first], lines), media_type="application/x-jsonl")


def _results(context: Context, found: Results) -> Iterator[bytes]:
    if found.input is None:
        return message_results.results(_lines(context, found.output), _lines(context, found.error))
    if found.outcome in ("canceled", "expired"):
        outcome: dict[str, Any] = {"type": found.outcome}
    else:
        outcome = message_results.errored(found.outcome, found.reason)
    chosen = None if found.chosen_lines is None else set(line_set.decode(found.chosen_lines).tolist())
    rows = (
        orjson.loads(line)
        for line_no, line in enumerate(_lines(context, found.input), start=1)
        if chosen is None or line_no in chosen
    )
    return (message_results.result_line(row["custom_id"], outcome) for row in rows)


def _lines(context: Context, file: File | None) -> Iterator[bytes]:
    """The lines of a file of ours."""
    if file is None:
        return
    rest = b""
    try:
        for piece in context.store.stream(file.s3_key, etag=file.etag or None):
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
    except NotFoundError as error:
        raise UnavailableError(f"The bytes of {file.id} are missing from the store.", code="content_missing") from error
    if rest:
        yield rest


def _shown(session: Session, context: Context, request: Request, rows: list[Any]) -> list[dict[str, Any]]:
    base = context.settings.public_url or str(request.base_url)
    return message_service.show(session, rows, f"{base.rstrip('/')}{MESSAGES}/batches")
