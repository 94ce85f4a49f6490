"""The statuses of a batch in OpenAI's spelling, and the only moves between them.

    validating -> in_progress -> finalizing -> completed | expired | cancelled
        |             |               ^
        |             +-> cancelling -+
        +-> failed | cancelled | expired      (no lines, no files, no cost)

`finalizing` is entered by sealing: then `why`, the status that the batch will end with, is fixed, and no part is added
any more. A terminal batch never changes again. Every move is an UPDATE that names the statuses it may start from, so
of two callers at once one moves and the other learns that it didn't.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sqlalchemy.orm import Session

from batchsvc.batches import queries
from batchsvc.files import purge_queries
from batchsvc.files.retention import Kind


class Status(StrEnum):
    """Status of a batch, as stored and as shown."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ALLOWED: dict[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.CANCELLED, Status.EXPIRED}),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING}),
    Status.CANCELLING: frozenset({Status.FINALIZING}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.EXPIRED, Status.CANCELLED}),
    Status.FAILED: frozenset(),
    Status.COMPLETED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.CANCELLED: frozenset(),
}
TERMINAL = frozenset(status for status, moves in ALLOWED.items() if not moves)
UNFINISHED = frozenset(ALLOWED) - TERMINAL  # SQL asks for these: ix_batches_status can't serve NOT IN

# when a batch entered a status; the end has one column, because there is only one end
_STAMPS = {
    Status.IN_PROGRESS: "in_progress_ms",
    Status.FINALIZING: "finalizing_ms",
    Status.CANCELLING: "cancelling_ms",
    **dict.fromkeys(TERMINAL, "ended_ms"),
}


def sources(to: Status) -> frozenset[Status]:
    """The statuses from which a batch may move to `to`."""
    return frozenset(status for status, moves in ALLOWED.items() if to in moves)


def move(
    session: Session,
    batch_id: str,
    to: Status,
    *,
    now_ms: int,
    fence: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
) -> bool:
    """Move a batch, stamp the time, and write `values` with it. False: not in a status to move from, or fenced off.

    What only a running batch needs of its plan is wiped after its end (files/retention.py).
    `fence` names columns and the values that they must still have, such as {"plan_epoch": 3}.
    """
    if not sources(to):
        return False  # nothing leads to `validating`: a batch begins there
    changes: dict[str, Any] = {"status": to, _STAMPS[to]: now_ms, **(values or {})}
    moved = queries.update_batch(session, batch_id, from_=sources(to), fence=fence or {}, values=changes)
    if moved and to in TERMINAL:
        purge_queries.add(session, Kind.PLAN, batch_id, now_ms)
    return moved
