"""`batchsvc db`: which schema a database has, and the explicit upgrade to this version's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption
from batchsvc.cli.target import select

if TYPE_CHECKING:
    from batchsvc.db.migrate import Schema

app = typer.Typer(no_args_is_help=True, help="The schema of the database.", rich_markup_mode=None)

_NEVER_BACK = (
    "A database is never downgraded: install the older version, and restore the backup that was made before the "
    "upgrade into a fresh place with `batchsvc restore`."
)


@app.command("upgrade")
def upgrade_command(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing: say what would be done; exit 1 if anything would.")
    ] = False,
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a database to this version's schema; processes of the old version run on meanwhile.

    Replace them by the new version afterwards, one by one: a process that starts wants its own version's schema.
    """
    from batchsvc.db.migrate import schema_of

    console = Console(as_json=as_json)
    with _database_url(data_dir, from_env=from_env) as url:
        before = schema_of(url)
        before.refuse_newer()
        shown = {"from": before.found, "to": before.head, "pending": list(before.pending or ())}
        if check or not before.pending:
            console.result(shown)
            console.out(_told(before))
            if before.pending:
                raise typer.Exit(Exit.FAILED)
            return
        bring_up(url, before)
    console.result(shown)
    console.out(f"The database went from {before.found or 'nothing'} to revision {before.head}.")


@app.command()
def downgrade(
    revision: Annotated[str | None, typer.Argument(metavar="[REVISION]", help="Any: it is refused.")] = None,
) -> None:
    """Refused: says what to do instead."""
    del revision
    raise CommandError(_NEVER_BACK, Exit.USAGE)


def bring_up(url: str, before: Schema) -> None:
    """Upgrade a database, seed its price book and note both in the audit log. Raises CommandError during a backup."""
    from sqlalchemy.orm import Session

    from batchsvc.audit.actions import Action
    from batchsvc.audit.actor import at_command_line
    from batchsvc.audit.service import record
    from batchsvc.billing.service import seed_prices
    from batchsvc.db.migrate import upgrade
    from batchsvc.db.session import Database

    if before.pending and not url.startswith("sqlite"):
        _refuse_backup(url)
    upgrade(url)

    def settle(session: Session) -> None:
        seed_prices(session)
        if before.pending:
            steps = {"from": before.found, "to": before.head}
            record(session, at_command_line(), Action.DATABASE_UPGRADED, before.head, details=steps)

    database = Database(url)
    try:
        database.run(settle)
    finally:
        database.dispose()


def _refuse_backup(url: str) -> None:
    """A backup reads all tables of PostgreSQL in one transaction: a migration would wait for it, and all others behind
    the migration."""
    from batchsvc.batches import collection_queries
    from batchsvc.batches.tables import CollectionLock
    from batchsvc.db.session import Database
    from batchsvc.db.snapshot import tables_of

    database = Database(url)
    try:
        with database.reading() as session:
            if CollectionLock.__tablename__ not in tables_of(session.connection()):
                return  # a schema that knows no holds, or none
            held = collection_queries.holds(session)
    finally:
        database.dispose()
    if held:
        until = datetime.fromtimestamp(held[-1].until_ms / 1000, UTC).strftime("%H:%M:%S")
        raise CommandError(
            f"{held[-1].reason.capitalize()} is being made: upgrade when it has ended (if it was killed, after {until} "
            "UTC, when it ceases to count)."
        )


def _told(schema: Schema) -> str:
    if not schema.pending:
        return f"The database is at revision {schema.head}: nothing to do."
    return f"An upgrade is due from {schema.found or 'nothing'} to {schema.head}: {', '.join(schema.pending)}."


@contextmanager
def _database_url(data_dir: Path | None, *, from_env: bool) -> Iterator[str]:
    """The database of the environment's settings, or that of a data directory, in which no stack may run."""
    if from_env:
        if data_dir is not None:
            raise CommandError("--from-env names a deployment of its own: leave --data-dir out.", Exit.USAGE)
        from batchsvc.settings import Settings

        yield Settings.from_env().database_url
        return
    directory = select(data_dir, None, None, {}).directory
    assert directory is not None, "no server was named"
    if not directory.database.exists():
        hint = " (did you mean --from-env?)" if os.environ.get("DATABASE_URL") else ""
        raise CommandError(f"There is no database in {directory.root}: `batchsvc up` makes one there{hint}.")
    lock = directory.lock()  # raises InUseError; the stack of a data directory upgrades it when it starts
    try:
        yield directory.database_url
    finally:
        lock.release()
