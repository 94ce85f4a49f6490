"""New batches of the lines that an ended batch has not answered: `retry` and `continue`.

The new batch reads the same input file, and of it only the chosen lines, which keep their numbers. So a line has one
number over a whole chain of batches (`parent_batch_id`), and results of a chain are joined by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson
from sqlalchemy.orm import Session

from batchsvc.accounts.idempotency import RETRY_MS
from batchsvc.accounts.service import Caller
from batchsvc.batches import budget_queries, line_set, never_ran, queries, result_service, service
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.model_pins import BY_LINE
from batchsvc.batches.schemas import CreateBatch, RunAgain
from batchsvc.batches.tables import Batch
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError
from batchsvc.files import service as files
from batchsvc.files.tables import File
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore

_NANOS = 10**9


class Scope(StrEnum):
    """Which lines run again: all that have an error line, or those that nobody has run."""

    RETRY = "retry"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class Ended:
    """A batch whose lines may run again. `errors` None: it ended before a line was planned, so all of them may."""

    batch: Batch
    scope: Scope
    errors: File | None
    inherited: bytes | None  # the lines that it had itself, if not all of its input


def ended(session: Session, project_id: str, batch_id: str, scope: Scope) -> Ended:
    """The batch whose lines are to run again. Raises InvalidRequestError if it has none."""
    batch, results = result_service.batch_at(session, project_id, batch_id)
    if batch.status not in TERMINAL:
        raise _refused(batch, f"only a batch that has ended has lines to {scope}: wait for it or cancel it")
    if batch.status == Status.FAILED:
        raise _refused(batch, "nothing of it has run: correct what its `errors` name and create a new batch")
    if scope is Scope.CONTINUE and batch.status == Status.COMPLETED:
        raise _refused(batch, "all of its lines have run: `retry` runs those again that failed")
    has_run = batch.in_progress_ms is not None
    errors = results.error if results else None
    if has_run and errors is None:
        raise _refused(batch, "every line has its answer", code="nothing_to_retry")
    return Ended(batch, scope, errors, None if has_run else batch.chosen_lines)


def chosen_lines(store: ObjectStore, found: Ended) -> bytes | None:
    """The lines that run again, as line_set.py writes them; None: all of the input."""
    if found.errors is None:
        return found.inherited
    rows = result_service.file_rows(store, found.errors, 0)
    line_nos = [row["line"] for row in (orjson.loads(data) for _, data in rows) if _is_meant(row, found.scope)]
    if not line_nos:
        raise _refused(found.batch, "all of its lines have run: `retry` runs those again that failed")
    return line_set.encode(line_nos)


def create(
    session: Session,
    caller: Caller,
    found: Ended,
    chosen: bytes | None,
    wishes: RunAgain,
    settings: Settings,
    *,
    batch_id: str,
    is_retry: bool,
) -> Batch:
    """The new batch, at the prices of today. `batch_id` and `is_retry` as for every new batch."""
    body = _body(found.batch, wishes)
    # held till the transaction ends: whoever sends this call again waits here, and then sees what the first one made
    if files.find_for_batch(session, caller.project_id, found.batch.input_file_id) is None:
        became = files.why_gone(session, caller.project_id, found.batch.input_file_id) or "it isn't there"
        says = f"its input {found.batch.input_file_id} is gone ({became}): upload it again for a new batch"
        raise _refused(found.batch, says, code="input_deleted")
    if is_retry:
        since_ms = database_now_ms(session) - RETRY_MS
        for earlier in queries.continuations(session, caller.api_key_id, found.batch, since_ms):
            if earlier.chosen_lines == chosen and service.is_same(earlier, body):
                return earlier
    row = service.create_batch(session, caller, body, settings, batch_id=batch_id)
    row.parent_batch_id, row.chosen_lines = found.batch.id, chosen
    if found.batch.num_requests:  # a message batch counts its requests from the start
        row.num_requests = found.batch.num_requests if chosen is None else len(line_set.decode(chosen))
    session.flush()
    return row


def _body(parent: Batch, wishes: RunAgain) -> CreateBatch:
    life_s, most = parent.output_expires_after_s, parent.max_cost_nanos
    inherited: dict[str, Any] = {
        "input_file_id": parent.input_file_id,
        "endpoint": parent.endpoint,
        "completion_window": parent.completion_window,
        "metadata": parent.metadata_json,
        "output_expires_after": {"anchor": "created_at", "seconds": life_s} if life_s else None,
        "model": parent.model_requested,
        "models": "one" if parent.models is None else BY_LINE,
        "on_invalid": parent.on_invalid,
        "name": parent.name,
        "priority": parent.priority,
        "on_quota": parent.on_quota,
        "output_s3": parent.output_s3,
        "max_cost": None if most is None else f"{most // _NANOS}.{most % _NANOS:09d}",
    }
    return CreateBatch.model_validate(inherited | wishes.model_dump(exclude_none=True))


def _is_meant(row: dict[str, Any], scope: Scope) -> bool:
    if scope is Scope.RETRY:
        return True
    return row["response"] is None and row["error"]["code"] in never_ran.CODES | {budget_queries.CODE}


def _refused(batch: Batch, why: str, code: str = "not_possible") -> InvalidRequestError:
    return InvalidRequestError(f"{batch.id} is {batch.status}: {why}.", code=code, param="batch_id")
