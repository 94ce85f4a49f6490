"""A copy of a database at one moment, and a database made of one: what both kinds have in common.

A snapshot gives a session to read that moment with, and files whose bytes are the whole of it. SQLite's is its online
backup, one file. PostgreSQL's is what `pg_dump` writes where that program is at hand, else our own: each table by COPY.
All of PostgreSQL's are read in one read-only transaction that sees a single moment, so nobody waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

VERSION_TABLE = "alembic_version"

Kind = Literal["sqlite", "postgresql-copy", "postgresql-dump"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """A file of a snapshot. `pieces` may be asked for once, while the snapshot is open. Of a table: whose, and which
    columns."""

    name: str
    pieces: Callable[[], Iterable[bytes]]
    table: str | None = None
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A database at one moment: read it with `session`, keep it by its `files`."""

    kind: Kind
    revision: str
    now_ms: int
    session: Session
    files: tuple[SnapshotFile, ...]


def snapshot_of(database_url: str, scratch: Path, tables: Collection[str]) -> AbstractContextManager[Snapshot]:
    """The snapshot of this moment. `scratch` is a folder for whatever is as large as the database; `tables` are ours:
    of PostgreSQL, which others may share, it has no others.

    Raises UnavailableError if the database doesn't answer or isn't sound.
    """
    if database_url.startswith("sqlite"):
        from batchsvc.db import sqlite_snapshot

        return sqlite_snapshot.taken(database_url, scratch)
    from batchsvc.db import postgres_snapshot

    return postgres_snapshot.taken(database_url, tables)


def load(
    database_url: str,
    kind: Kind,
    revision: str,
    files: Iterable[SnapshotFile],
    scratch: Path,
    tables: Collection[str],
    *,
    settle: Callable[[str], None],
) -> None:
    """Put a snapshot in the place of what is in these tables of the database, and `settle` the database of a URL.

    SQLite's is settled before it takes its place, so all happens or nothing. PostgreSQL is loaded in one transaction
    and settled behind it; where pg_restore fails, its tables are gone, and the message says so. Raises UnavailableError
    where the snapshot can't be loaded, and SchemaError for a revision that this version doesn't know.
    """
    if kind == "sqlite":
        from batchsvc.db import sqlite_snapshot

        sqlite_snapshot.load(database_url, next(iter(files)), settle)
        return
    from batchsvc.db import postgres_snapshot

    if kind == "postgresql-dump":
        postgres_snapshot.load_dump(database_url, next(iter(files)), scratch, tables)
    else:
        postgres_snapshot.load_tables(database_url, revision, list(files), tables)
    settle(database_url)


def family(kind_or_url: str) -> str:
    """Which database a kind of snapshot, or a URL, is of: in words."""
    return "SQLite" if kind_or_url.startswith("sqlite") else "PostgreSQL"


def tables_of(connection: Connection) -> set[str]:
    """Names of the tables that are there, without those of PostgreSQL's extensions."""
    from sqlalchemy import inspect

    return set(inspect(connection).get_table_names()) - _of_extensions(connection)


def others_of(connection: Connection, tables: Collection[str]) -> set[str]:
    """Names of tables and views that are there beside `tables` and the one of migrations."""
    from sqlalchemy import inspect

    views = set(inspect(connection).get_view_names()) - _of_extensions(connection)
    return (tables_of(connection) | views) - {*tables, VERSION_TABLE}


def _of_extensions(connection: Connection) -> set[str]:
    """What came with CREATE EXTENSION, as it does in databases of many providers: it is nobody's work."""
    if connection.dialect.name == "sqlite":
        return set()
    asked = (
        "SELECT c.relname FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.classid = 'pg_class'::regclass"
        " WHERE d.deptype = 'e' AND c.relnamespace = current_schema()::regnamespace"
    )
    return set(connection.execute(text(asked)).scalars())


def revisions_of(session: Session) -> list[str]:
    """What alembic has noted; usually one."""
    return list(session.scalars(text("SELECT version_num FROM alembic_version")))


def revision_of(session: Session) -> str:
    """The revision of a database's schema."""
    return str(session.execute(text("SELECT version_num FROM alembic_version")).scalar_one())


def without_password(message: str) -> str:
    """What a program of PostgreSQL's said, as one line that names no password."""
    first = next((line for line in message.splitlines() if line.strip()), "")
    return re.sub(r"://[^@\s]*@", "://", first).strip().rstrip(".")


def file_pieces(path: Path, chunk: int = 1 << 20) -> Iterator[bytes]:
    """The bytes of a file."""
    with path.open("rb") as file:
        while piece := file.read(chunk):
            yield piece
