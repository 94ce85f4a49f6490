"""Deletes ended batches and files, for their project or for an operator.

Deleting takes out of sight at once; workers/purge.py then wipes the content out of every store. The rows stay with
their counts, tokens and money, because bills, usage and `batchsvc explain` read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import Actor
from batchsvc.audit.service import record
from batchsvc.batches import absent, deletion_queries, queries, service, wipe_queries
from batchsvc.batches.lifecycle import TERMINAL
from batchsvc.batches.tables import Batch
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.files import purge_queries
from batchsvc.files import service as files
from batchsvc.files.retention import Kind

Discard = Callable[[Session, str], None]


def delete_batch(session: Session, project_id: str, batch_id: str, *, with_input: bool, discard: Discard) -> Batch:
    """Delete an ended batch with its results, and with its input if that is wanted and no running batch reads it.

    What it cost stays on the bill. Raises InvalidRequestError for one that runs, NotFoundError for none.
    """
    row = deletion_queries.locked(session, project_id, batch_id)
    if row is None:
        raise absent.no_batch(session, project_id, batch_id)
    if row.status not in TERMINAL:
        raise InvalidRequestError(
            f"{row.id} hasn't ended: cancel it first, or wait for it.", code="batch_not_ended", param="batch_id"
        )
    if with_input:
        _delete_input(session, row, discard)
    for file_id in (row.output_file_id, row.error_file_id):
        if file_id and files.find_for_batch(session, project_id, file_id) is not None:
            files.delete(session, project_id, file_id, live_batch_of=service.live_batch_of, discard=discard)
    row.deleted_ms = database_now_ms(session)
    wipe_queries.end_export(session, row.id)
    purge_queries.add(session, Kind.BATCH, row.id, row.deleted_ms)
    session.flush()
    return row


def delete_any(session: Session, actor: Actor, object_id: str, *, with_input: bool, discard: Discard) -> dict[str, Any]:
    """Delete a file or an ended batch of whatever project, for an operator, and note that. Returns what the API shows
    of it, with its project."""
    owner = deletion_queries.owner(session, object_id)
    if owner is None:
        raise NotFoundError(f"There is no file or batch {object_id[:64]}.", param="id")
    if owner.kind is Kind.FILE:
        if with_input:
            raise InvalidRequestError("input: it is for a batch.", code="invalid_value", param="input")
        files.delete(session, owner.project_id, object_id, live_batch_of=service.live_batch_of, discard=discard)
    else:
        delete_batch(session, owner.project_id, object_id, with_input=with_input, discard=discard)
    details = {"object": owner.kind.value, "with_input": with_input}
    record(session, actor, Action.RESOURCE_DELETED, object_id, project_id=owner.project_id, details=details)
    return {
        "id": object_id,
        "object": owner.kind.value,
        "project_id": owner.project_id,
        "deleted": True,
    }


def _delete_input(session: Session, row: Batch, discard: Discard) -> None:
    if files.find_for_batch(session, row.project_id, row.input_file_id) is None:
        return
    reader = queries.live_batch_of(session, row.input_file_id, TERMINAL)
    if reader is not None:
        raise InvalidRequestError(
            f"The input of {row.id} is read by {reader}, which hasn't ended: wait for it or cancel it first.",
            code="file_in_use",
            param="batch_id",
        )
    files.delete(session, row.project_id, row.input_file_id, live_batch_of=service.live_batch_of, discard=discard)
