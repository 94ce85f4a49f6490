"""Snapshots of SQLite: its online backup copies the pages of one moment while others read and write."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from sqlalchemy import make_url

from batchsvc.db.session import Database, database_now_ms
from batchsvc.db.snapshot import Snapshot, SnapshotFile, file_pieces, revision_of
from batchsvc.errors import UnavailableError

_BUSY_S = 30.0
NAME = "database.sqlite3.zst"


@contextmanager
def taken(database_url: str, scratch: Path) -> Iterator[Snapshot]:
    """See snapshot_of. The copy lies in `scratch` until the snapshot is closed."""
    path, copy = path_of(database_url), scratch / "database.sqlite3"
    if not path.exists():
        raise UnavailableError(f"There is no database {path}.")
    try:
        with closing(sqlite3.connect(path, timeout=_BUSY_S)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)  # all pages in one step: it sees one moment and holds up no writer (WAL)
            target.execute("PRAGMA journal_mode=DELETE")  # so that the one file is all of it
            _check(target, path)
    except sqlite3.Error as error:
        raise UnavailableError(f"The database {path} can't be copied: {error}.") from error
    database = Database(f"sqlite:///{copy}")
    try:
        with database.reading() as session:
            yield Snapshot(
                kind="sqlite",
                revision=revision_of(session),
                now_ms=database_now_ms(session),
                session=session,
                files=(SnapshotFile(name=NAME, pieces=lambda: file_pieces(copy)),),
            )
    finally:
        database.dispose()
        _remove(copy)


def load(database_url: str, file: SnapshotFile, settle: Callable[[str], None]) -> None:
    """Settle a copy, and put it in the place of the database. Nobody may have that open: see `is_in_use`."""
    path = path_of(database_url)
    fresh = path.with_name(f".{path.name}.restored")
    _remove(fresh)
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as sink:
            for piece in file.pieces():
                sink.write(piece)
        with closing(sqlite3.connect(fresh)) as copy:
            _check(copy, fresh)
        settle(f"sqlite:///{fresh}")
        with closing(sqlite3.connect(fresh)) as copy:
            copy.execute("PRAGMA journal_mode=DELETE")  # so that the one file is all of it
        with fresh.open("rb") as settled:
            os.fsync(settled.fileno())
        for suffix in ("-wal", "-shm"):  # of the database before: they would be taken for the new one's
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        fresh.replace(path)
    except sqlite3.Error as error:
        raise UnavailableError(f"The copy of the database can't be used: {error}.") from error
    finally:
        _remove(fresh)


def is_in_use(database_url: str) -> bool:
    """Whether another process has the database open: then its journal can't be changed."""
    path = path_of(database_url)
    if not path.exists():
        return False
    with closing(sqlite3.connect(path, timeout=1, isolation_level=None)) as probe:
        try:
            before = probe.execute("PRAGMA journal_mode").fetchone()[0]
            if before != "wal":
                return False
            after = probe.execute("PRAGMA journal_mode=DELETE").fetchone()[0]
            probe.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            return True
    return bool(after != "delete")


def path_of(database_url: str) -> Path:
    """The file of a sqlite:/// URL."""
    return Path(make_url(database_url).database or "")


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    said = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if said != "ok":
        raise UnavailableError(f"The database {path} is damaged ({said}): restore a backup.")
