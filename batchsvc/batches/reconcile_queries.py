"""How an audit reads: the database by SQL text over a connection of its own that can't write, objects as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, create_engine, event, text

_NOW = {
    "sqlite": "SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)",
}


class Snapshot:
    """The database at one moment."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def rows(self, sql: str, *, many: str | None = None, **values: Any) -> list[dict[str, Any]]:
        """All rows of a query; `many` names the value that is a list."""
        statement = text(sql)
        if many is not None:
            statement = statement.bindparams(bindparam(many, expanding=True))
        return [dict(row) for row in self._connection.execute(statement, values).mappings()]

    def one(self, sql: str, **values: Any) -> dict[str, Any] | None:
        """The first row of a query."""
        found = self._connection.execute(text(sql), values).mappings().first()
        return None if found is None else dict(found)

    def number(self, sql: str, **values: Any) -> int:
        """A count or a sum; 0 of nothing."""
        return int(self._connection.execute(text(sql), values).scalar() or 0)

    def now_ms(self) -> int:
        return self.number(_NOW[self._connection.dialect.name])


class Reader:
    """A connection that can only read. Close it at the end."""

    def __init__(self, database_url: str) -> None:
        if database_url.startswith("sqlite"):
            self._engine = create_engine(database_url, connect_args={"timeout": 30, "check_same_thread": False})
            _keep_from_writing(self._engine)
        else:
            address = "postgresql+psycopg://" + database_url.partition("://")[2]
            self._engine = create_engine(
                address,
                pool_size=1,
                pool_pre_ping=True,
                isolation_level="REPEATABLE READ",
                execution_options={"postgresql_readonly": True},
                hide_parameters=True,
            )

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """One moment for several queries. Short: nothing is read from the store meanwhile."""
        with self._engine.connect() as connection:
            yield Snapshot(connection)
            connection.rollback()


def decoded(value: Any) -> Any:
    """A JSON column, which one database gives as text and the other as what it says."""
    return json.loads(value) if isinstance(value, str) else value


def _keep_from_writing(engine: Engine) -> None:
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # a transaction begins where we say so, not where the driver guesses
        connection.execute("PRAGMA busy_timeout=30000")
        connection.execute("PRAGMA query_only=ON")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
