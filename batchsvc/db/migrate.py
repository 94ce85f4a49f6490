"""Brings a database to the schema of this version; several processes may try at once, one does it.

The whole upgrade is one transaction: PostgreSQL holds an advisory lock in it, SQLite its only write lock, so the
others wait and then find nothing to do. A schema newer than this version is refused, because an old process would
write rows that the new one doesn't expect. `python -m batchsvc.db.migrate` migrates DATABASE_URL.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, event, text
from sqlalchemy.exc import OperationalError

from batchsvc.db.session import Database
from batchsvc.errors import UnavailableError
from batchsvc.settings import Settings, SettingsError

_LOCK = 0x6261746368737663  # "batchsvc": the key of PostgreSQL's advisory lock


def upgrade(database_url: str) -> None:
    """Migrate to the newest revision. Raises SettingsError if the schema is newer than this version."""
    database = Database(database_url)
    if database.is_sqlite:
        # a table that alembic copies is dropped, which would cascade to the rows that refer to it
        event.listen(database.engine, "connect", _foreign_keys_off)
    try:
        with database.engine.begin() as connection:
            if not database.is_sqlite:
                connection.execute(text("SET LOCAL lock_timeout = 0"))
                connection.execute(text("SET LOCAL statement_timeout = 0"))
                connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            config = _config(connection)
            _refuse_newer(connection, config)
            command.upgrade(config, "head")
    except OperationalError as error:
        reason = str(error.orig).splitlines()[0].rstrip(".")
        raise UnavailableError(f"The database doesn't answer: {reason}.") from error
    finally:
        database.dispose()


def current(database_url: str) -> str | None:
    """The revision of a database, or None if it is empty."""
    database = Database(database_url)
    try:
        with database.engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        database.dispose()


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _refuse_newer(connection: Connection, config: Config) -> None:
    found = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise SettingsError(
            f"The database was migrated by a newer version of batchsvc (revision {found}): install that version."
        )


def _foreign_keys_off(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA foreign_keys=OFF")


if __name__ == "__main__":
    try:
        upgrade(Settings.from_env().database_url)
    except (SettingsError, UnavailableError) as problem:
        sys.exit(problem.message)
