"""Routes of quotes: ask for one, look at it."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any

from fastapi import APIRouter
from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts import idempotency
from batchsvc.accounts.caller import CallerDep
from batchsvc.accounts.door import default_limits
from batchsvc.accounts.idempotency import RepetitionDep
from batchsvc.batches import inputs, quote_queries, quote_service
from batchsvc.batches.quote_schemas import CreateQuote, quote_object
from batchsvc.batches.reading import PlanContext
from batchsvc.batches.tables import Quote
from batchsvc.batches.texts_here import text_here
from batchsvc.files import stored_limit
from batchsvc.http.deps import Context, ContextDep

router = APIRouter(prefix="/v1")


@router.post("/batches/quote")
def create_quote(
    caller: CallerDep, context: ContextDep, body: CreateQuote, repetition: RepetitionDep
) -> dict[str, Any]:
    """What a batch of this input would cost. A small one is planned at once, if this process has the model; any other
    is planned by a control worker, and polled; if the message to that is lost, the reaper asks again."""
    quote_id = ids.quote_id()

    given = inputs.s3_input(context, caller, body.input_file_id)

    def create(session: Session) -> dict[str, Any]:
        call = body
        if given is not None:
            file = given.record(session, is_retry=repetition.is_retry)
            stored_limit.count(session, caller, file, default_limits(context.settings))
            call = body.model_copy(update={"input_file_id": file.id})
        return {"id": quote_service.create_quote(session, caller, call, context.settings, quote_id=quote_id).id}

    made = context.db.run(
        lambda session: idempotency.once(
            session, caller.project_id, "quotes", repetition.key, body.model_dump(), partial(create, session)
        )
    )
    row = _found(context, caller.project_id, made["id"])
    if row.status == quote_queries.QUEUED:
        planning = PlanContext(context.db, context.store, context.settings, text_here)
        if quote_service.plan_here(planning, row, ids.worker_id(socket.gethostname(), os.getpid())):
            row = _found(context, caller.project_id, row.id)
        else:
            context.dispatcher.quote(row.id)
    return quote_object(row)


@router.get("/batches/quote/{quote_id}")
def retrieve_quote(caller: CallerDep, context: ContextDep, quote_id: str) -> dict[str, Any]:
    """One quote, or estimate."""
    return quote_object(_found(context, caller.project_id, quote_id))


def _found(context: Context, project_id: str, quote_id: str) -> Quote:
    with context.db.reading() as session:
        return quote_service.get(session, project_id, quote_id)
