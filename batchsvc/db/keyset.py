"""Pages by keyset: rows beyond a cursor of (created, id), each row once however many share a millisecond."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

S = TypeVar("S", bound=Select[Any])


@dataclass(frozen=True, slots=True)
class Cursor:
    """The row that a page starts after."""

    created_ms: int
    id: str


def page(
    query: S,
    created: InstrumentedAttribute[int],
    key: InstrumentedAttribute[str],
    after: Cursor | None,
    limit: int,
    ascending: bool,
) -> S:
    """The query, cut to `limit` rows beyond `after`, oldest first if `ascending`, else newest first."""
    if after is not None:
        here, there = tuple_(created, key), tuple_(after.created_ms, after.id)
        query = query.where(here > there if ascending else here < there)
    if ascending:
        return query.order_by(created.asc(), key.asc()).limit(limit)
    return query.order_by(created.desc(), key.desc()).limit(limit)
