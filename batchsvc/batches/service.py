"""What can be done with batches: create, find, list, cancel, show.

Create refuses wrong arguments of the call. Wrong content of the input file is never judged here: the planner reports
it on the batch, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.accounts.idempotency import RETRY_MS
from batchsvc.accounts.service import Caller
from batchsvc.batches import completion, models, outlook, queries, waiting
from batchsvc.batches.completion import CompletionWindow
from batchsvc.batches.estimate import Habits
from batchsvc.batches.lifecycle import TERMINAL, Status, move
from batchsvc.batches.offpeak import Night
from batchsvc.batches.schemas import CreateBatch, batch_object
from batchsvc.batches.tables import Batch
from batchsvc.billing import service as billing
from batchsvc.db.keyset import Cursor
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.files import service as files
from batchsvc.http.paging import PageArgs
from batchsvc.settings import Settings

ENDPOINT = "/v1/chat/completions"
_MAX_METADATA, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


def create_batch(
    session: Session, caller: Caller, body: CreateBatch, settings: Settings, *, batch_id: str, is_retry: bool = False
) -> Batch:
    """A new batch in `validating`, with price book and aliases pinned. Raises InvalidRequestError, naming the param.

    `batch_id` is fresh, and chosen by the caller, so that a transaction whose answer was lost can be run again.
    `is_retry`: the client says that it sends the same call again, because it got no answer; if the first one was
    heard, its batch is returned.
    """
    if (made := queries.batch(session, caller.project_id, batch_id)) is not None:
        return made
    window = _check(body, settings)
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
        for earlier in queries.batches_like(session, caller.api_key_id, file.id, now - RETRY_MS):
            if _is_same(earlier, body):
                return earlier
    version = billing.current_version(session)
    if not billing.has_tier(session, window.tier, version):
        raise InvalidRequestError(
            f"completion_window: {window.name} has no prices here, so nothing can run in it: "
            f"version {version} of the price book lacks the tier {window.tier}.",
            code="window_not_priced",
            param="completion_window",
        )
    aliases = models.alias_table(session)
    if body.model is not None:
        _check_model(session, body.model, aliases, window.tier, version)
    row = Batch(
        id=batch_id,
        project_id=caller.project_id,
        api_key_id=caller.api_key_id,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        tier=window.tier,
        on_invalid=body.on_invalid,
        on_quota=body.on_quota,
        priority=body.priority,
        is_offpeak=not Night.from_settings(settings).is_always,
        name=body.name,
        metadata_json=body.metadata,
        output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
        status=Status.VALIDATING,
        created_ms=now,
        expires_ms=now + window.length_ms,
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


def show(
    session: Session,
    rows: Sequence[Batch],
    renew_s: float,
    night: Night | None = None,
    habits: Habits | None = None,
) -> list[dict[str, Any]]:
    """Batches as the API shows them, each with how far it is, when it will end, and what it waits for."""
    night = night or Night()
    around = waiting.look_around(session, rows, night, renew_s)
    looks = outlook.outlooks(session, rows, night, habits or Habits())
    return [
        batch_object(
            row,
            looks[row.id],
            waiting_for=waiting.waiting_for(row, around),
            scheduled_ms=waiting.scheduled_ms(row, around),
        )
        for row in rows
    ]


def _check(body: CreateBatch, settings: Settings) -> CompletionWindow:
    """The window that the call asks for. Raises InvalidRequestError for what can't be used."""

    def refuse(param: str, says: str) -> InvalidRequestError:
        return InvalidRequestError(f"{param}: {says}", code="invalid_value", param=param)

    if body.endpoint != ENDPOINT:
        raise refuse("endpoint", f"this service runs {ENDPOINT} only.")
    windows = completion.offered(settings.windows)
    if body.completion_window not in windows:
        raise refuse("completion_window", f"it must be {' or '.join(windows)}.")
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
    return windows[body.completion_window]


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
        and (row.model_requested, row.on_invalid, row.on_quota, row.priority)
        == (body.model, body.on_invalid, body.on_quota, body.priority)
        and row.output_expires_after_s == expires_s
    )
