"""Engines, transactions and the database's clock, the same on SQLite and PostgreSQL.

SQLite: write transactions begin IMMEDIATE (a deferred one that upgrades fails at once, whatever the timeout), WAL,
and a busy wait. `FOR UPDATE SKIP LOCKED` is dropped there, which is safe because writers are serialized.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

T = TypeVar("T")

_PAUSE_S = 0.02
_SQLITE_PRAGMAS = (
    "busy_timeout=30000",  # first: the next one waits for whoever makes the same file
    "journal_mode=WAL",
    "synchronous=NORMAL",
    "foreign_keys=ON",
    "recursive_triggers=ON",
    "secure_delete=ON",  # what was deleted is overwritten with zeros
)
_SWITCH_TRIES, _SWITCH_PAUSE_S = 100, 0.1
_TRUNCATE_WAIT_MS = 200
_SQLITE_NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
_POSTGRES_NOW = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


class Database:
    """One database of the service. `transaction()` commits once at its end; `reading()` never writes."""

    def __init__(self, url: str, *, pool_size: int = 5) -> None:
        self.url = url
        self.is_sqlite = url.startswith("sqlite")
        if self.is_sqlite:
            self.engine = create_engine(
                url, connect_args={"timeout": 30, "check_same_thread": False}, hide_parameters=True
            )
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
        else:
            self.engine = create_engine(
                _psycopg(url),
                pool_size=pool_size,
                max_overflow=10,
                pool_pre_ping=True,
                hide_parameters=True,  # an error's text must not carry what users sent
                pool_recycle=1800,
                connect_args={
                    "connect_timeout": 5,
                    # a process that stops in the middle of a transaction must not hold its locks for ever
                    "options": "-c statement_timeout=30000 -c lock_timeout=10000"
                    " -c idle_in_transaction_session_timeout=15000",
                    # and one whose server is gone without a word must learn of it within a lease
                    "keepalives_idle": 10,
                    "keepalives_interval": 5,
                    "keepalives_count": 3,
                    "tcp_user_timeout": 20000,
                },
            )
        self._read_engine: Engine = self.engine.execution_options(read_only=True, postgresql_readonly=True)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A write transaction: committed at the end of the block, rolled back if it raises."""
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction to read in: on SQLite it takes no write lock, PostgreSQL refuses whatever it would write."""
        with Session(self._read_engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def snapshot(self) -> Iterator[Session]:
        """Like `reading`, and all its queries see the same moment: on SQLite they do anyway."""
        with self.reading() as session:
            if not self.is_sqlite:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    def run(self, work: Callable[[Session], T], *, attempts: int = 3) -> T:
        """Run `work` in one write transaction, again as a whole after a deadlock or a lost connection.

        Between attempts it waits for moments, at random, so that those who met don't meet again. `work` must be
        repeatable: a commit whose reply was lost is run again, so its effects are guarded by unique keys or fences.
        """
        return self._run(work, attempts, lambda error: error.connection_invalidated or _was_undone(error))

    def once(self, work: Callable[[Session], T], *, attempts: int = 3) -> T:
        """Run `work` in one write transaction, again only where the database says that nothing of it has happened, as
        after a deadlock: for what must not happen twice, such as a new key."""
        return self._run(work, attempts, _was_undone)

    def _run(self, work: Callable[[Session], T], attempts: int, may_retry: Callable[[DBAPIError], bool]) -> T:
        for attempt in range(attempts):
            try:
                with self.transaction() as session:
                    return work(session)
            except DBAPIError as error:
                if attempt == attempts - 1 or not may_retry(error):
                    raise
                time.sleep(random.uniform(0, _PAUSE_S * 2**attempt))  # noqa: S311  jitter
        raise AssertionError("unreachable: the last attempt returns or raises")

    def truncate_log(self) -> bool:
        """Leave nothing in SQLite's write-ahead log that was deleted since. False: somebody reads or writes just now.

        PostgreSQL recycles its log by itself, which is said to be done here.
        """
        if not self.is_sqlite:
            return True
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout={_TRUNCATE_WAIT_MS}")  # writers wait meanwhile
            is_busy = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            cursor.execute(f"PRAGMA {_SQLITE_PRAGMAS[0]}")
            return not is_busy
        finally:
            connection.close()

    def forget_freed(self) -> bool:
        """Write SQLite's file anew without what was deleted before `secure_delete` was set. False: it couldn't be done
        now, because somebody uses the file, or the disk has no room for a second one."""
        if not self.is_sqlite:
            return True
        connection = self.engine.raw_connection()
        try:
            connection.cursor().execute("VACUUM")
        except sqlite3.OperationalError:
            return False
        finally:
            connection.close()
        return self.truncate_log()

    def dispose(self) -> None:
        self.engine.dispose()


def database_now_ms(session: Session) -> int:
    """The database's own clock in milliseconds; leases and deadlines compare with nothing else."""
    return int(session.execute(text(f"SELECT {database_now_sql(session)}")).scalar_one())


def database_now_sql(session: Session) -> str:
    """The expression that reads the database's clock, for a statement that asks for more."""
    return _SQLITE_NOW if session.get_bind().dialect.name == "sqlite" else _POSTGRES_NOW


def _psycopg(url: str) -> str:
    for prefix in ("postgres://", "postgresql://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url[len(prefix) :]
    return url


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we emit BEGIN ourselves
    for pragma in _SQLITE_PRAGMAS:
        _set(connection, pragma)


def _set(connection: Any, pragma: str) -> None:
    """Whoever changes the journal of a file that another is changing gets no wait from SQLite, but an error at once."""
    for left in reversed(range(_SWITCH_TRIES)):
        try:
            connection.execute(f"PRAGMA {pragma}")
            return
        except sqlite3.OperationalError as error:
            if not left or "locked" not in str(error):
                raise
            time.sleep(_SWITCH_PAUSE_S)


def _begin_sqlite(connection: Connection) -> None:
    read_only = connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _was_undone(error: DBAPIError) -> bool:
    """Whether the database itself has rolled the transaction back, or never begun it."""
    if error.connection_invalidated:
        return False
    state = getattr(error.orig, "sqlstate", None)
    return state in {"40001", "40P01"} or "database is locked" in str(error.orig)
