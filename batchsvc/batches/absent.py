"""Says why a batch isn't there, and what was deleted of one that is."""

from __future__ import annotations

from sqlalchemy.orm import Session

from batchsvc.batches import deletion_queries
from batchsvc.batches.tables import Batch
from batchsvc.errors import NotFoundError
from batchsvc.files import service as files
from batchsvc.files.retention import date_of

DELETED = "batch_deleted"  # code of the error for a batch that was there


def no_batch(session: Session, project_id: str, batch_id: str) -> NotFoundError:
    """The error for a batch that a project doesn't have: it was deleted, or never was."""
    deleted_ms = deletion_queries.deleted_ms(session, project_id, batch_id)
    if deleted_ms is None:
        return NotFoundError(f"No batch found with id '{batch_id}'.", param="batch_id")
    return NotFoundError(
        f"{batch_id} was deleted on {date_of(deleted_ms)}: `batchsvc explain {batch_id}` shows what it cost.",
        code=DELETED,
        param="batch_id",
    )


def what_is_gone(session: Session, row: Batch) -> list[str]:
    """What was deleted of a batch, or is past its life, in sentences that name the day; nothing: an empty list."""
    says = [] if row.deleted_ms is None else [f"The batch was deleted on {date_of(row.deleted_ms)}."]
    named = {"input": row.input_file_id, "output": row.output_file_id, "error file": row.error_file_id}
    became = files.whereabouts(session, [file_id for file_id in named.values() if file_id])
    return says + [
        f"Nothing is left of its {name} ({file_id}): {became[file_id]}."
        for name, file_id in named.items()
        if file_id in became
    ]
