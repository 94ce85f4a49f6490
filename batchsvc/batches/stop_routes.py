"""Routes of stopping for a while and of going on after a stop: pause, resume, retry, continue."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter
from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts import idempotency
from batchsvc.accounts.caller import CallerDep
from batchsvc.accounts.idempotency import Repetition, RepetitionDep
from batchsvc.accounts.service import Caller
from batchsvc.batches import continuation, service, traces
from batchsvc.batches.continuation import Scope
from batchsvc.batches.estimate import Habits
from batchsvc.batches.message_body import MESSAGES
from batchsvc.batches.offpeak import Night
from batchsvc.batches.schemas import RunAgain
from batchsvc.batches.tables import Batch
from batchsvc.clock import now_ns
from batchsvc.http.deps import Context, ContextDep

router = APIRouter(prefix="/v1/batches/{batch_id}")


@router.post("/pause")
def pause_batch(caller: CallerDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """Let no more of a batch run until it is resumed. It stays in_progress, and its deadline stays."""
    return context.db.run(lambda session: _shown(session, context, service.pause(session, caller.project_id, batch_id)))


@router.post("/resume")
def resume_batch(caller: CallerDep, context: ContextDep, batch_id: str) -> dict[str, Any]:
    """Let a batch run on that its project has paused; one that an operator has paused is refused."""
    return context.db.run(
        lambda session: _shown(session, context, service.resume(session, caller.project_id, batch_id))
    )


@router.post("/retry")
def retry_batch(
    caller: CallerDep, context: ContextDep, batch_id: str, repetition: RepetitionDep, body: RunAgain | None = None
) -> dict[str, Any]:
    """A new batch of all lines of an ended one that have an error line."""
    return _again(caller, context, batch_id, repetition, body, Scope.RETRY)


@router.post("/continue")
def continue_batch(
    caller: CallerDep, context: ContextDep, batch_id: str, repetition: RepetitionDep, body: RunAgain | None = None
) -> dict[str, Any]:
    """A new batch of the lines that an expired or cancelled one has not run."""
    return _again(caller, context, batch_id, repetition, body, Scope.CONTINUE)


def _again(
    caller: Caller, context: Context, batch_id: str, repetition: Repetition, body: RunAgain | None, scope: Scope
) -> dict[str, Any]:
    wishes, call, began_ns = body or RunAgain(), f"batches/{batch_id}/{scope}", now_ns()
    with context.db.reading() as session:
        asked = (caller.project_id, call, repetition.key, wishes.model_dump())
        if (before := idempotency.answered(session, *asked)) is not None:  # its results may be gone since
            return before
        ended = continuation.ended(session, caller.project_id, batch_id, scope)
    new_id = ids.message_batch_id() if ended.batch.endpoint == MESSAGES else ids.batch_id()
    chosen = continuation.chosen_lines(context.store, ended)

    def create(session: Session) -> dict[str, Any]:
        row = continuation.create(
            session, caller, ended, chosen, wishes, context.settings, batch_id=new_id, is_retry=repetition.is_retry
        )
        return _shown(session, context, row)

    shown = context.db.run(lambda session: idempotency.once(session, *asked, partial(create, session)))
    if shown["id"] == new_id:
        traces.created(new_id, shown["input_file_id"], began_ns=began_ns)
    context.dispatcher.plan(shown["id"])
    return shown


def _shown(session: Session, context: Context, row: Batch) -> dict[str, Any]:
    settings = context.settings
    night, habits = Night.from_settings(settings), Habits.from_settings(settings)
    return service.show(session, [row], settings.renew_s, night, habits)[0]
