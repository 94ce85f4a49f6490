"""Opens the database behind a command that needs no server: a data directory's, or the deployment's of the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from batchsvc.cli.exits import CommandError, Exit
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import read_state

if TYPE_CHECKING:
    from batchsvc.db.session import Database


@contextmanager
def database_of(data_dir: Path | None, *, from_env: bool, model: str | None = None) -> Iterator[Database]:
    """The migrated database. In a fresh data directory it is made first, with `model` if that is the shipped one."""
    if from_env and data_dir is not None:
        raise CommandError("Name either --data-dir or --from-env, not both.", Exit.USAGE)
    database = _of_settings() if from_env else _of_directory(DataDir.at(data_dir), model)
    try:
        yield database
    finally:
        database.dispose()


def _of_settings() -> Database:
    from batchsvc.db.session import Database
    from batchsvc.settings import Settings

    return Database(Settings.from_env().database_url)


def _of_directory(directory: DataDir, model: str | None) -> Database:
    from batchsvc.db.session import Database
    from batchsvc.stack.prepare import is_registered, prepare_database, prepare_model

    directory.create()
    database = Database(directory.database_url)
    if read_state(directory) is None:
        lock = directory.lock()
        try:
            prepare_database(directory, database)
        finally:
            lock.release()
    if model is not None and not is_registered(database, model):
        prepare_model(database, model, lambda _: None)
    return database
