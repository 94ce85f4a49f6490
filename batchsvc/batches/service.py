"""What can be done with batches: create, find, list, cancel; and what a batch waits for.

Create refuses wrong arguments of the call. Wrong content of the input file is never judged here: the planner reports
it on the batch, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts.service import Caller
from batchsvc.batches import models, queries, unit_queries
from batchsvc.batches.lifecycle import TERMINAL, Status, move
from batchsvc.batches.schemas import CreateBatch, batch_object
from batchsvc.batches.tables import Batch
from batchsvc.billing import service as billing
from batchsvc.db.keyset import Cursor
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.files import service as files
from batchsvc.http.paging import PageArgs

ENDPOINT = "/v1/chat/completions"
WINDOWS = {"24h": ("batch_24h", 24 * 3_600_000)}  # completion window: its price tier, and milliseconds
SILENT_RENEWALS = 3  # a worker that missed as many heartbeats serves nobody
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512
_REPEAT_MS = 15 * 60_000
_USUAL_ATTEMPTS = 2  # to finalize: one that was killed, and its successor


def create_batch(session: Session, caller: Caller, body: CreateBatch, *, is_retry: bool = False) -> Batch:
    """A new batch in `validating`, with price book and aliases pinned. Raises InvalidRequestError, naming the param.

    `is_retry`: the client says that it sends the same call again, because it got no answer; if the first one was
    heard, its batch is returned.
    """
    _check(body)
    now = database_now_ms(session)
    file = files.find_for_batch(session, caller.project_id, body.input_file_id)
    if file is None:
        raise InvalidRequestError(
            f"input_file_id: there is no file {body.input_file_id[:64]}.", code="invalid_request", param="input_file_id"
        )
    if file.purpose != files.PURPOSE:
        raise InvalidRequestError(
            f"input_file_id: {file.id} has purpose '{file.purpose}', and an input needs '{files.PURPOSE}'.",
            code="invalid_request",
            param="input_file_id",
        )
    if is_retry:
        for earlier in queries.batches_like(session, caller.api_key_id, file.id, now - _REPEAT_MS):
            if _is_same(earlier, body):
                return earlier
    tier, window_ms = WINDOWS[body.completion_window]
    version = billing.current_version(session)
    aliases = models.alias_table(session)
    if body.model is not None:
        _check_model(session, body.model, aliases, tier, version)
    row = Batch(
        id=ids.batch_id(),
        project_id=caller.project_id,
        api_key_id=caller.api_key_id,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        tier=tier,
        on_invalid=body.on_invalid,
        name=body.name,
        metadata_json=body.metadata,
        output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
        status=Status.VALIDATING,
        created_ms=now,
        expires_ms=now + window_ms,
        model_requested=body.model,
        price_version=version,
        aliases=aliases,
    )
    session.add(row)
    session.flush()
    return row


def get(session: Session, project_id: str, batch_id: str) -> Batch:
    """A batch of this project. Raises NotFoundError."""
    row = queries.batch(session, project_id, batch_id)
    if row is None:
        raise NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")
    return row


def list_batches(session: Session, project_id: str, page: PageArgs, name: str | None) -> list[Batch]:
    """One more batch than the page holds, if there is one."""
    after = None
    if page.after is not None:
        row = page.known(queries.batch(session, project_id, page.after))
        after = Cursor(row.created_ms, row.id)
    return queries.batches(
        session, project_id, after=after, limit=page.limit + 1, ascending=page.is_ascending, name=name
    )


def cancel(session: Session, project_id: str, batch_id: str) -> Batch:
    """Cancel a batch; what is finished stays, is delivered and billed. Cancelling again changes nothing.

    A batch that is being finalized has no work left to save: it is returned as it is. A finished one is refused.
    """
    row = get(session, project_id, batch_id)
    now = database_now_ms(session)
    moved = move(
        session,
        row.id,
        Status.CANCELLED,
        now_ms=now,
        fence={"status": Status.VALIDATING},
        # the epoch ends what a planner is doing at this moment
        values={"why": Status.CANCELLED, "plan_epoch": Batch.plan_epoch + 1, "cancel_seq": Batch.cancel_seq + 1},
    ) or move(session, row.id, Status.CANCELLING, now_ms=now, values={"cancel_seq": Batch.cancel_seq + 1})
    row = get(session, project_id, batch_id)
    if not moved and row.status in TERMINAL and row.status != Status.CANCELLED:
        raise InvalidRequestError(
            f"{row.id} is {row.status}: a batch that has ended can't be cancelled.",
            code="batch_already_ended",
            param="batch_id",
        )
    return row


def live_batch_of(session: Session, file_id: str) -> str | None:
    """A batch that still reads this input file, or None."""
    return queries.live_batch_of(session, file_id, TERMINAL)


def show(session: Session, rows: Sequence[Batch], renew_s: float) -> list[dict[str, Any]]:
    """Batches as the API shows them, each with what it waits for."""
    served: set[str] = set()
    delayed: set[str] = set()
    if running := {row.model_digest or "" for row in rows if row.status == Status.IN_PROGRESS}:
        served = queries.served_digests(session, alive_since_ms(session, renew_s))
        delayed = unit_queries.delayed_batches(session, running)
    return [batch_object(row, waiting_for=_waiting_for(row, served, delayed)) for row in rows]


def alive_since_ms(session: Session, renew_s: float) -> int:
    """A worker that gave no sign of life since this time counts as dead."""
    return database_now_ms(session) - round(SILENT_RENEWALS * renew_s * 1000)


def _waiting_for(row: Batch, served: set[str], delayed: set[str]) -> str | None:
    if row.status == Status.FINALIZING and row.fin_epoch > _USUAL_ATTEMPTS:
        says = f"its results can't be put together, this is attempt {row.fin_epoch}"
        return f"{says}: the log of the control worker says why"
    if row.status != Status.IN_PROGRESS:
        return None
    if row.model_digest not in served:
        return f"no worker for model {row.model_id}"
    if row.id in delayed:  # a unit is only given back for later when a worker could not read it
        return "its stored work can't be read, a worker tries again: the log of the engine worker says why"
    return None


def _check(body: CreateBatch) -> None:
    def refuse(param: str, says: str) -> InvalidRequestError:
        return InvalidRequestError(f"{param}: {says}", code="invalid_value", param=param)

    if body.endpoint != ENDPOINT:
        raise refuse("endpoint", f"this service runs {ENDPOINT} only.")
    if body.completion_window not in WINDOWS:
        raise refuse("completion_window", f"it must be {' or '.join(WINDOWS)}.")
    if body.name is not None and not (body.name.isprintable() and body.name.strip()):
        raise refuse("name", "it must be printable characters.")
    metadata = body.metadata or {}
    if len(metadata) > _MAX_METADATA:
        raise refuse("metadata", f"it has {len(metadata)} pairs; the most is {_MAX_METADATA}.")
    for key, value in metadata.items():
        if len(key) > _MAX_KEY_CHARS or len(value) > _MAX_VALUE_CHARS:
            raise refuse(
                "metadata", f"a key has at most {_MAX_KEY_CHARS} characters and a value at most {_MAX_VALUE_CHARS}."
            )
        if "\0" in key or "\0" in value:
            raise refuse("metadata", "the character NUL can't be stored.")


def _check_model(session: Session, name: str, aliases: dict[str, str], tier: str, version: int) -> None:
    model = models.resolve(session, name, aliases)
    if model is None:
        raise InvalidRequestError(
            f"model: there is no model {name}; GET /v1/models lists what there is.",
            code="model_not_found",
            param="model",
        )
    billing.rates_for(session, model.id, tier, version)


def _is_same(row: Batch, body: CreateBatch) -> bool:
    expires_s = body.output_expires_after.seconds if body.output_expires_after else None
    return (
        (row.endpoint, row.completion_window, row.metadata_json, row.name)
        == (body.endpoint, body.completion_window, body.metadata, body.name)
    ) and (row.model_requested, row.on_invalid, row.output_expires_after_s) == (body.model, body.on_invalid, expires_s)
