"""Pages of the audit log as the API answers them: newest first, onward with `after`, back with `before`."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from batchsvc.audit import queries
from batchsvc.audit.queries import Filter
from batchsvc.audit.schemas import row_object
from batchsvc.db.keyset import Cursor
from batchsvc.errors import InvalidRequestError
from batchsvc.http.paging import page_object

MOST = 100


def page(
    session: Session, wanted: Filter, *, limit: int, after: str | None = None, before: str | None = None
) -> dict[str, Any]:
    """At most `limit` rows: those that come after a row in this order, or those that end right before one.

    Raises InvalidRequestError for a row that isn't there, and for both at once.
    """
    if after is not None and before is not None:
        raise InvalidRequestError("after and before exclude each other: leave one out.", param="before")
    if before is None:
        found = queries.rows(session, wanted, _cursor(session, "after", after), limit + 1)
        return page_object(found, limit, row_object)
    nearest = queries.rows(session, wanted, _cursor(session, "before", before), limit + 1, is_ascending=True)
    shown = page_object(list(reversed(nearest[:limit])), limit, row_object)
    return {**shown, "has_more": len(nearest) > limit}


def _cursor(session: Session, name: str, row_id: str | None) -> Cursor | None:
    if row_id is None:
        return None
    row = queries.row(session, row_id)
    if row is None:
        raise InvalidRequestError(f"{name}: there is no audit row {row_id[:64]}.", code="invalid_value", param=name)
    return Cursor(row.effective_ms, row.id)
