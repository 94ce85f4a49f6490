"""Wire shapes of message batches: Anthropic's objects."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.schemas import MOST_REQUESTS, shown_status
from batchsvc.batches.tables import Batch

_BUCKETS = {Status.FAILED: "errored", Status.CANCELLED: "canceled", Status.EXPIRED: "expired"}


class MessageRequest(BaseModel):
    """One request. What is wrong with its `params` costs it alone, later; a custom_id must be right from the start."""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    params: dict[str, Any]


class CreateMessageBatch(BaseModel):
    """Body of POST /v1/messages/batches."""

    model_config = ConfigDict(extra="forbid", strict=True)

    requests: list[MessageRequest] = Field(min_length=1, max_length=MOST_REQUESTS)


def message_batch_object(
    row: Batch, *, never_ran: int, now_ms: int, archived_ms: int | None, url: str
) -> dict[str, Any]:
    """A message batch as the API shows it. Its results are kept until `archived_ms`; `url` is where all batches are."""
    is_ended = row.status in TERMINAL
    is_archived = is_ended and archived_ms is not None and archived_ms <= now_ms
    cancelled_ms = row.cancelling_ms or (row.ended_ms if row.status == Status.CANCELLED else None)
    return {
        "id": row.id,
        "type": "message_batch",
        "processing_status": _processing_status(row),
        "request_counts": request_counts(row, never_ran),
        "created_at": _rfc3339(row.created_ms),
        "expires_at": _rfc3339(row.expires_ms),
        "ended_at": _rfc3339(row.ended_ms),
        "cancel_initiated_at": _rfc3339(cancelled_ms),
        "archived_at": _rfc3339(archived_ms) if is_archived else None,
        "results_url": f"{url}/{row.id}/results" if is_ended and not is_archived else None,
    }


def request_counts(row: Batch, never_ran: int) -> dict[str, int]:
    """How many requests are in which state: always all of them, and in a final one only when the batch has ended."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    total = row.num_requests or row.total
    if row.status not in TERMINAL:
        return {**counts, "processing": total}
    if row.in_progress_ms is None:  # it ended before it began
        return {**counts, _BUCKETS[Status(row.status)]: total}
    left = 0 if row.status == Status.COMPLETED else min(never_ran, row.failed)
    counts |= {"succeeded": row.completed, "errored": row.failed - left}
    return {**counts, _BUCKETS[Status(row.status)]: left} if left else counts


def _processing_status(row: Batch) -> str:
    if row.status in TERMINAL:
        return "ended"
    return "canceling" if shown_status(row) == Status.CANCELLING else "in_progress"


def _rfc3339(ms: int | None) -> str | None:
    if ms is None:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
