"""The migrations and the tables in code agree, on both databases, however many processes migrate at once."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, TextClause, inspect, text

from batchsvc.accounts.tables import Project
from batchsvc.batches import unit_queries
from batchsvc.batches.tables import Batch
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.settings import SettingsError
from batchsvc.tables import metadata


def test_head_equals_the_tables_in_code(database_url: str) -> None:
    assert migrate.current(database_url) is None
    migrate.upgrade(database_url)
    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(files("migrations")))
    database = Database(database_url)
    with database.engine.connect() as connection:
        config.attributes["connection"] = connection
        command.check(config)  # raises if they differ
    tables = set(inspect(database.engine).get_table_names())
    database.dispose()
    assert tables == {*metadata.tables, "alembic_version"}


def test_four_processes_migrate_once(database_url: str, tmp_path: Path) -> None:
    script = "import sys; from batchsvc.db import migrate; print(flush=True); migrate.upgrade(sys.stdin.readline())"
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", script],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in started:  # all wait at the same line before any goes on
        assert process.stdout is not None and process.stdout.readline() == "\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write(database_url)
        process.stdin.close()
        process.stdin = None
    for process in started:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    database = Database(database_url)
    with database.reading() as session:
        assert session.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1
    database.dispose()


def test_a_newer_schema_is_refused(database_url: str) -> None:
    migrate.upgrade(database_url)
    migrate.upgrade(database_url)  # again changes nothing
    database = Database(database_url)
    with database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.dispose()
    with pytest.raises(SettingsError, match=r"newer version of batchsvc \(revision 9999\)"):
        migrate.upgrade(database_url)


def test_a_failed_migration_leaves_nothing(database_url: str) -> None:
    database = Database(database_url)
    with database.transaction() as session:
        session.execute(text("CREATE TABLE units (x INTEGER)"))  # in the way of the first revision
    with pytest.raises(Exception, match="already exists"):
        migrate.upgrade(database_url)
    assert inspect(database.engine).get_table_names() == ["units"]
    database.dispose()


def test_rows_of_the_first_schema_stay_valid(database_url: str) -> None:
    """A batch that was running before the upgrade runs on: admitted, not paused, at any time of day."""
    database = Database(database_url)
    with database.engine.begin() as connection:
        command.upgrade(migrate._config(connection), "0001")
        for table, values in (
            ("projects", {"id": "p", "name": "n", "salt": "s", "weight": 1, "created_ms": 1}),
            ("batches", {"id": "b", "project_id": "p", "status": "in_progress", "expires_ms": 9_999_999_999_999}),
            ("units", {"id": "u", "batch_id": "b", "model_digest": "d", "state": "ready", "num_lines": 1}),
        ):
            connection.execute(*_old_row(connection, table, values))
    migrate.upgrade(database_url)
    with database.reading() as session:
        assert unit_queries.scaling(session, is_night=False)["d"].claimable == 1
        batch = session.get_one(Batch, "b")
        assert (batch.has_quota, batch.on_quota, batch.is_paused, batch.priority) == (True, "wait", False, 0)
        assert session.get_one(Project, "p").quota_tokens is None
    database.dispose()


def _old_row(connection: Connection, table: str, values: dict[str, object]) -> tuple[TextClause, dict[str, object]]:
    """An insert in the words of the old schema: what isn't named is zero, empty or null."""
    row = dict(values)
    for column in inspect(connection).get_columns(table):
        if column["name"] not in row and not column["nullable"]:
            kind = column["type"].python_type
            row[column["name"]] = {int: 0, str: "", bytes: b"\0", bool: False}[kind]
    names = ", ".join(row)
    return text(f"INSERT INTO {table} ({names}) VALUES ({', '.join(':' + name for name in row)})"), row
