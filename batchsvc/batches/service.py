"""What can be done with batches: create, find, list, cancel, show.

Create refuses wrong arguments of the call. Wrong content of the input file is never judged here: the planner reports
it on the batch, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.accounts.door import default_limits
from batchsvc.accounts.idempotency import RETRY_MS
from batchsvc.accounts.service import Caller
from batchsvc.batches import (
    absent,
    export_queries,
    open_limit,
    outlook,
    poison_queries,
    queries,
    quote_terms,
    terms,
    waiting,
)
from batchsvc.batches.estimate import Habits
from batchsvc.batches.lifecycle import TERMINAL, Status, move
from batchsvc.batches.model_pins import BY_LINE
from batchsvc.batches.offpeak import Night
from batchsvc.batches.schemas import CreateBatch, batch_object
from batchsvc.batches.tables import Batch
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError
from batchsvc.files import store_service
from batchsvc.files.s3_uri import parse_prefix
from batchsvc.http.paging import PageArgs
from batchsvc.money import parse_dollars
from batchsvc.settings import Settings

ENDPOINT = terms.ENDPOINT
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
    window = terms.window_of(body.endpoint, body.completion_window, settings)
    _check(body)
    output = output_prefix(session, caller.project_id, body, settings)
    max_cost_nanos = _max_cost_nanos(body)
    now = database_now_ms(session)
    quote = quote_terms.quote_of(session, caller.project_id, body)
    if quote is not None:
        body = quote_terms.with_options_of(body, quote)
    terms.check_models(body.models, body.model)
    file = terms.input_file(session, caller.project_id, body.input_file_id or "")
    if is_retry:
        for earlier in queries.batches_like(session, caller.api_key_id, file.id, now - RETRY_MS):
            if earlier.parent_batch_id is None and is_same(earlier, body):
                return earlier
    if quote is None:
        pins = asdict(terms.pinned_now(session, window, body.model, now, project_id=caller.project_id))
        pins["models"] = {} if body.models == BY_LINE else None
    else:
        pins = quote_terms.pins(session, body, quote, file.sha256)
    open_limit.check(session, caller, default_limits(settings))
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
        max_cost_nanos=max_cost_nanos,
        priority=body.priority,
        is_offpeak=not Night.from_settings(settings).is_always,
        name=body.name,
        metadata_json=body.metadata,
        output_expires_after_s=body.output_expires_after.seconds if body.output_expires_after else None,
        status=Status.VALIDATING,
        created_ms=now,
        expires_ms=now + window.length_ms,
        model_requested=body.model,
        output_s3=output,
        **pins,
    )
    session.add(row)
    if output is not None:
        export_queries.add(session, row)
    session.flush()
    return row


def output_prefix(session: Session, project_id: str, body: CreateBatch, settings: Settings) -> str | None:
    """Where the results shall go besides, as it is kept. Raises PermissionDeniedError unless it is registered."""
    if body.output_s3 is None:
        return None
    prefix = parse_prefix(body.output_s3, "output_s3")
    store_service.access(session, project_id, prefix, settings, "output_s3")
    return str(prefix)


def get(session: Session, project_id: str, batch_id: str) -> Batch:
    """A batch of this project. Raises NotFoundError."""
    row = queries.batch(session, project_id, batch_id)
    if row is None:
        raise absent.no_batch(session, project_id, batch_id)
    return row


def is_there(session: Session, project_id: str, batch_id: str) -> bool:
    """Whether nobody has deleted this batch of the project."""
    return queries.batch(session, project_id, batch_id) is not None


def list_batches(session: Session, project_id: str, page: PageArgs, name: str | None) -> list[Batch]:
    """One more batch than the page holds, if there is one."""
    after = None
    if page.after is not None:
        after = page.known(queries.cursor(session, project_id, page.after))
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


def pause(session: Session, project_id: str, batch_id: str) -> Batch:
    """Let no more of a batch run until it is resumed; what runs is saved and given back. Its deadline stays."""
    row = get(session, project_id, batch_id)
    _require_running(row)
    row = poison_queries.pause(session, row.id, None)
    _require_running(row)  # locked now: it may have been cancelled before it was
    return row


def resume(session: Session, project_id: str, batch_id: str) -> Batch:
    """Let a batch run on that its project has paused."""
    return poison_queries.resume(session, get(session, project_id, batch_id).id, is_operator=False)


def live_batch_of(session: Session, file_id: str) -> str | None:
    """A batch that still reads this input file, or None."""
    return queries.live_batch_of(session, file_id, TERMINAL)


def at_risk(session: Session, project_ids: Collection[str], night: Night, habits: Habits) -> list[Batch]:
    """The batches of these projects that will probably miss their deadline, as their `at_risk` says."""
    rows = queries.running(session, project_ids)
    looks = outlook.outlooks(session, rows, night, habits)
    return [row for row in rows if looks[row.id].is_at_risk]


def capped(session: Session, project_ids: Collection[str], since_ms: int) -> list[Batch]:
    """The batches of these projects that have a `max_cost` and cost something, unless they ended before then."""
    live = [status for status in Status if status not in TERMINAL]
    return queries.capped(session, project_ids, live, since_ms)


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
    exports = export_queries.of_batches(session, rows)
    return [
        batch_object(
            row,
            looks[row.id],
            waiting_for=waiting.waiting_for(row, around),
            scheduled_ms=waiting.scheduled_ms(row, around),
            export=exports.get(row.id),
        )
        for row in rows
    ]


def _check(body: CreateBatch) -> None:
    """Raises InvalidRequestError for what can't be used."""

    def refuse(param: str, says: str) -> InvalidRequestError:
        return InvalidRequestError(f"{param}: {says}", code="invalid_value", param=param)

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


def _max_cost_nanos(body: CreateBatch) -> int | None:
    if body.max_cost is None:
        return None
    nanos = parse_dollars(body.max_cost)
    if nanos is None or nanos <= 0:
        raise InvalidRequestError(
            'max_cost: it must be an amount of dollars above 0, such as "12.50", exact to a nano-dollar.',
            code="invalid_value",
            param="max_cost",
        )
    return nanos


def _require_running(row: Batch) -> None:
    if row.status not in (Status.VALIDATING, Status.IN_PROGRESS):
        raise InvalidRequestError(
            f"{row.id} is {row.status}: only a batch that is validating or in_progress can be paused.",
            code="batch_not_running",
            param="batch_id",
        )


def is_same(row: Batch, body: CreateBatch) -> bool:
    """Whether a batch is what this call would make of its file."""
    expires_s = body.output_expires_after.seconds if body.output_expires_after else None
    return (
        (row.endpoint, row.completion_window, row.metadata_json, row.name)
        == (body.endpoint, body.completion_window, body.metadata, body.name)
        and (row.model_requested, row.on_invalid, row.on_quota, row.priority, row.max_cost_nanos)
        == (body.model, body.on_invalid, body.on_quota, body.priority, _max_cost_nanos(body))
        and (row.output_expires_after_s, row.quote_id) == (expires_s, body.quote_id)
        and (row.models is not None) == (body.models == BY_LINE)
        and row.output_s3 == (str(parse_prefix(body.output_s3, "output_s3")) if body.output_s3 else None)
    )
