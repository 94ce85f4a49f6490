"""An INSERT that can say what becomes of a row that is there already: a statement of each database's own dialect."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session


def insert(session: Session, table: type[Any] | Table) -> sqlite.Insert | postgresql.Insert:
    """To be followed by `on_conflict_do_nothing` or `on_conflict_do_update`, which both dialects have."""
    return sqlite.insert(table) if session.get_bind().dialect.name == "sqlite" else postgresql.insert(table)
