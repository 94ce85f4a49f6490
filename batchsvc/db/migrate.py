"""Brings a database to the schema of this version; several processes may try at once, one does it.

On SQLite the whole upgrade is one transaction, which has the only write lock; the others wait and then find nothing
to do. On PostgreSQL each migration is a transaction that holds an advisory lock (all are one where the database was
empty). There a statement that changes a table waits for whoever uses that, and all others wait behind it: so it gives
up after moments, lets them pass, and tries again. `python -m batchsvc.db.migrate` migrates DATABASE_URL.

A process that starts asks `require_current`. It refuses a schema newer than this version, because an old process would
write rows that the new one doesn't expect, and an older one, which lacks columns: an operator upgrades a database that
is in use (`batchsvc db upgrade`), no process does it by itself. Migrations only expand (a column or a table that an old
process doesn't name does it no harm), so processes that ran before the upgrade run on beside the new ones until they
are replaced. No database is downgraded: the way back is the backup that was made before.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
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

_WIPES = "0013"  # before this revision SQLite left what was deleted in the pages that it had freed

_PATIENCE_MS, _PAUSE_S, _TRIES = 2_000, 3.0, 40  # of a migration that waits for a table
_LOCKED = {"55P03", "40P01"}  # lock_not_available, deadlock_detected

_LOCATION = str(files("migrations")).replace("%", "%%")


class SchemaError(SettingsError):
    """The database's schema isn't the one that this version works with; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Where a database stands. `found` is None if it is empty; `pending` are the revisions up to `head`, oldest first,
    None if `found` is of a newer version."""

    found: str | None
    head: str
    pending: tuple[str, ...] | None

    def refuse_newer(self) -> None:
        """Raises SchemaError if a newer version has migrated it."""
        if self.pending is None:
            raise SchemaError(
                f"The database was migrated by a newer version of batchsvc (revision {self.found}), and this one works "
                f"with {self.head}: install that version, or restore a backup from before the upgrade."
            )


def schema_of(database_url: str) -> Schema:
    """Where a database stands. Raises UnavailableError if it doesn't answer."""
    database = Database(database_url)
    try:
        with database.engine.connect() as connection:
            return _schema(connection, _config(connection))
    except OperationalError as error:
        raise _silent(error) from error
    finally:
        database.dispose()


def is_known(revision: str) -> bool:
    """Whether a revision is one of this version's, or of one before it."""
    config = Config()
    config.set_main_option("script_location", _LOCATION)
    return revision in {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}


def require_current(database_url: str) -> None:
    """Raises SchemaError unless the database has exactly this version's schema, UnavailableError if it is silent."""
    schema = schema_of(database_url)
    schema.refuse_newer()
    if schema.pending:
        has = "is empty" if schema.found is None else f"is at revision {schema.found}"
        raise SchemaError(
            f"The database {has} and this version of batchsvc works with {schema.head}: make a backup, and run "
            "`batchsvc db upgrade --from-env`."
        )


def make_or_require(database_url: str) -> None:
    """Make the schema in an empty database, for whoever starts the first process of a deployment; else as
    `require_current`."""
    if schema_of(database_url).found is None:
        upgrade(database_url)
    else:
        require_current(database_url)


def upgrade(database_url: str) -> None:
    """Migrate to the newest revision. Raises SchemaError if the schema is newer than this version."""
    upgrade_to(database_url, "head")


def upgrade_to(database_url: str, revision: str) -> None:
    """Migrate up to a revision, as `upgrade` does: for what has to be put into a schema of its own age first."""
    database = Database(database_url)
    if database.is_sqlite:
        # a table that alembic copies is dropped, which would cascade to the rows that refer to it
        event.listen(database.engine, "connect", _foreign_keys_off)
    try:
        if not database.is_sqlite:
            while _step(database, revision):
                pass
            return
        with database.engine.begin() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
            upgrade_within(connection, revision)
        if found is not None and found < _WIPES and not database.forget_freed():
            sys.stderr.write(
                "The file of the database keeps bytes of what was deleted long ago: stop what uses it, see that its "
                f"disk has room for a second one, and run: sqlite3 {shlex.quote(str(database.engine.url.database))} "
                "VACUUM\n"
            )
    except OperationalError as error:
        raise _silent(error) from error
    finally:
        database.dispose()


def upgrade_within(connection: Connection, revision: str) -> None:
    """Migrate up to a revision as a part of the caller's transaction. Raises SchemaError as `upgrade` does."""
    config = _config(connection)
    _schema(connection, config).refuse_newer()
    command.upgrade(config, revision)


def _step(database: Database, revision: str) -> bool:
    """One migration of PostgreSQL in one transaction, all of them if the database is empty. False: none was left."""
    for left in reversed(range(_TRIES)):
        try:
            with database.engine.begin() as connection:
                for limit in ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"):
                    connection.execute(text(f"SET LOCAL {limit} = 0"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
                config = _config(connection)
                schema = _schema(connection, config)
                schema.refuse_newer()
                pending = list(schema.pending or ())
                if revision != "head":
                    pending = pending[: pending.index(revision) + 1] if revision in pending else []
                if not pending:
                    return False
                connection.execute(text(f"SET LOCAL lock_timeout = {_PATIENCE_MS}"))
                command.upgrade(config, pending[-1] if schema.found is None else pending[0])
                return True
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in _LOCKED:
                raise
            if not left:
                raise UnavailableError(
                    "The database wasn't upgraded to the end: somebody has used a table in one long transaction (a "
                    "pg_dump, or a psql that is left open?). End that (see pg_stat_activity), and try again."
                ) from error
        time.sleep(_PAUSE_S)
    raise AssertionError("unreachable: the last try returns or raises")


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
    config.set_main_option("script_location", _LOCATION)
    config.attributes["connection"] = connection
    return config


def _schema(connection: Connection, config: Config) -> Schema:
    found = MigrationContext.configure(connection).get_current_revision()
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()][::-1]
    if found is not None and found not in known:
        return Schema(found=found, head=known[-1], pending=None)
    done = 0 if found is None else known.index(found) + 1
    return Schema(found=found, head=known[-1], pending=tuple(known[done:]))


def _silent(error: OperationalError) -> UnavailableError:
    reason = str(error.orig).splitlines()[0].rstrip(".")
    return UnavailableError(f"The database doesn't answer: {reason}.")


def _foreign_keys_off(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA foreign_keys=OFF")


if __name__ == "__main__":
    try:
        upgrade(Settings.from_env().database_url)
    except (SettingsError, UnavailableError) as problem:
        sys.exit(problem.message)
