"""What can be done with message batches, over the rows of all batches: create, list, show, delete, read results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.accounts.service import Caller
from batchsvc.batches import absent, deletion_service, message_queries, queries, service
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.message_body import MESSAGES
from batchsvc.batches.message_schemas import message_batch_object
from batchsvc.batches.model_pins import BY_LINE
from batchsvc.batches.schemas import CreateBatch
from batchsvc.batches.tables import Batch
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.files import service as files
from batchsvc.files.tables import File
from batchsvc.settings import Settings

_WINDOW = "24h"
_NEVER_BEGAN = {
    Status.FAILED: ("errored", "api_error"),
    Status.CANCELLED: ("canceled", ""),
    Status.EXPIRED: ("expired", ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Where the results of an ended batch are: in its files; of one that never began, `input` names the requests (all,
    or the `chosen_lines`), `outcome` what became of all of them, and `reason` why."""

    output: File | None = None
    error: File | None = None
    input: File | None = None
    chosen_lines: bytes | None = None
    outcome: str = ""
    reason: str = ""


def create(
    session: Session,
    caller: Caller,
    settings: Settings,
    *,
    file_id: str,
    num_requests: int,
    batch_id: str,
    is_retry: bool,
) -> Batch:
    """A new message batch. Each request names its model; what is wrong with one costs that request alone."""
    body = CreateBatch(
        input_file_id=file_id, endpoint=MESSAGES, completion_window=_WINDOW, on_invalid="skip", models=BY_LINE
    )
    row = service.create_batch(session, caller, body, settings, batch_id=batch_id, is_retry=is_retry)
    row.num_requests = num_requests
    session.flush()
    return row


def get(session: Session, project_id: str, batch_id: str) -> Batch:
    """A message batch of this project. Raises NotFoundError."""
    row = queries.batch(session, project_id, batch_id)
    if row is not None and row.endpoint == MESSAGES:
        return row
    says = absent.no_batch(session, project_id, batch_id)
    if says.code == absent.DELETED:
        raise says
    raise NotFoundError(f"No message batch found with id '{batch_id}'.", param="message_batch_id")


def list_batches(
    session: Session, project_id: str, *, limit: int, after_id: str | None, before_id: str | None
) -> tuple[list[Batch], bool]:
    """A page, newest first, and whether there are more in its direction: older ones, or with `before_id` newer ones."""
    if after_id and before_id:
        raise InvalidRequestError("before_id: give it or after_id, not both.", code="invalid_value", param="before_id")
    beyond = None
    for name, batch_id in (("after_id", after_id), ("before_id", before_id)):
        if batch_id:
            beyond = queries.cursor(session, project_id, batch_id)
            if beyond is None:
                raise InvalidRequestError(
                    f"{name}: there is no message batch {batch_id}.", code="invalid_value", param=name
                )
    is_newer = bool(before_id)
    found = message_queries.message_batches(session, project_id, beyond=beyond, is_newer=is_newer, limit=limit + 1)
    rows = found[:limit]
    return (rows[::-1] if is_newer else rows), len(found) > limit


def delete(session: Session, project_id: str, batch_id: str, *, discard: Callable[[Session, str], None]) -> Batch:
    """Delete an ended batch with its requests and results. What it cost stays on the bill."""
    row = get(session, project_id, batch_id)
    _require_ended(row, "cancel it first, or wait for it")
    return deletion_service.delete_batch(session, project_id, row.id, with_input=True, discard=discard)


def results(session: Session, project_id: str, batch_id: str) -> Results:
    """Where the results of a batch are. Raises InvalidRequestError before it has ended, NotFoundError after theirs."""
    row = get(session, project_id, batch_id)
    _require_ended(row, "its results come when it has")
    if row.in_progress_ms is None:
        outcome, kind = _NEVER_BEGAN[Status(row.status)]
        reason = "; ".join(str(problem["message"]) for problem in (row.errors or [])[:1])
        return Results(
            input=files.get(session, project_id, row.input_file_id),
            chosen_lines=row.chosen_lines,
            outcome=kind or outcome,
            reason=reason,
        )
    output, error = (
        files.get(session, project_id, file_id) if file_id else None
        for file_id in (row.output_file_id, row.error_file_id)
    )
    return Results(output=output, error=error)


def show(session: Session, rows: Sequence[Batch], url: str) -> list[dict[str, Any]]:
    """Message batches as the API shows them; `url` is where all of them are."""
    stopped = [row.id for row in rows if row.status in TERMINAL]
    never_ran = message_queries.never_ran(session, stopped)
    now = database_now_ms(session)
    ended = [row for row in rows if row.status in TERMINAL]
    ends_ms = files.ends_ms(session, [file_id for row in ended for file_id in _kept_in(row)])
    return [
        message_batch_object(
            row,
            never_ran=never_ran.get(row.id, 0),
            now_ms=now,
            archived_ms=min((ends_ms[file_id] for file_id in _kept_in(row) if file_id in ends_ms), default=None),
            url=url,
        )
        for row in rows
    ]


def _kept_in(row: Batch) -> list[str]:
    """The files that the results of an ended batch are read from."""
    return [file_id for file_id in (row.output_file_id, row.error_file_id) if file_id] or [row.input_file_id]


def _require_ended(row: Batch, way_out: str) -> None:
    if row.status not in TERMINAL:
        raise InvalidRequestError(
            f"{row.id} hasn't ended: {way_out}.", code="batch_not_ended", param="message_batch_id"
        )
