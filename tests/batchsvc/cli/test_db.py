"""`batchsvc db upgrade`: says from where to where, changes nothing with --check, and never goes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from typer.testing import CliRunner, Result

from batchsvc.audit.tables import AuditRow
from batchsvc.batches.collection_queries import hold_collection, release_collection
from batchsvc.cli.app import app
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.db import migrate
from batchsvc.db.migrate import SchemaError
from batchsvc.db.session import Database
from batchsvc.errors import UnavailableError
from batchsvc.settings import Settings
from batchsvc.stack.datadir import DataDir, InUseError

OLD = "0011"


@pytest.fixture
def command(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `batchsvc` with the settings of a deployment."""
    monkeypatch.setenv("DATABASE_URL", settings.database_url)
    monkeypatch.setenv("REDIS_URL", settings.redis_url)

    def run(*words: str) -> Result:
        return CliRunner().invoke(app, words)

    return run


def test_an_upgrade_is_announced_made_and_noted(command: Callable[..., Result], settings: Settings) -> None:
    migrate.upgrade_to(settings.database_url, OLD)
    head = migrate.schema_of(settings.database_url).head
    announced = command("db", "upgrade", "--from-env", "--check")
    assert announced.exit_code == Exit.FAILED, "a script sees that one is due"
    assert announced.stdout.startswith(f"An upgrade is due from {OLD} to {head}: 0012, ")
    assert migrate.current(settings.database_url) == OLD, "--check changes nothing"
    done = command("db", "upgrade", "--from-env", "--json")
    assert done.exit_code == Exit.OK
    said = json.loads(done.stdout)
    assert (said["from"], said["to"], said["pending"][0]) == (OLD, head, "0012")
    again = command("db", "upgrade", "--from-env", "--check")
    assert (again.exit_code, again.stdout) == (Exit.OK, f"The database is at revision {head}: nothing to do.\n")
    database = Database(settings.database_url)
    with database.reading() as session:
        row = session.query(AuditRow).filter_by(action="database.upgraded").one()
        assert row.details == {"from": OLD, "to": head}
    database.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_no_upgrade_during_a_backup(command: Callable[..., Result], settings: Settings) -> None:
    migrate.upgrade_to(settings.database_url, "0014")
    database = Database(settings.database_url)
    database.run(lambda session: hold_collection(session, "backup:x", reason="a backup", hold_s=60))
    for words in (("db", "upgrade", "--from-env"), ("migrate",)):
        refused = command(*words)
        assert isinstance(refused.exception, CommandError), refused.exception
        assert refused.exception.message.startswith("A backup is being made: upgrade when it has ended")
    assert migrate.current(settings.database_url) == "0014"
    database.run(lambda session: release_collection(session, "backup:x"))
    assert command("db", "upgrade", "--from-env").exit_code == Exit.OK
    database.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_upgrade_lets_others_pass_while_it_waits_for_a_table(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads a table for long holds up the migration, and the migration nobody: it asks again and again."""
    monkeypatch.setattr(migrate, "_PATIENCE_MS", 50)
    migrate.upgrade_to(settings.database_url, "0010")
    database = Database(settings.database_url)
    pauses: list[float] = []

    def pass_by(pause_s: float) -> None:
        pauses.append(pause_s)
        with database.reading() as other:
            other.execute(text("SET LOCAL lock_timeout = '1s'"))
            other.execute(text("SELECT 1 FROM batches")).all()
        if len(pauses) == 2:
            reader.rollback()

    monkeypatch.setattr(migrate.time, "sleep", pass_by)
    with database.engine.connect() as reader:
        for table in ("projects", "batches", "units", "parts"):
            reader.execute(text(f"SELECT 1 FROM {table}")).all()
        migrate.upgrade(settings.database_url)
        assert len(pauses) == 2
        migrate.require_current(settings.database_url)
    database.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_an_upgrade_that_never_gets_a_table_says_so(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "_PATIENCE_MS", 20)
    monkeypatch.setattr(migrate, "_TRIES", 2)
    monkeypatch.setattr(migrate, "_PAUSE_S", 0.0)
    migrate.upgrade_to(settings.database_url, "0010")
    database = Database(settings.database_url)
    with database.engine.connect() as reader:
        for table in ("projects", "batches", "units", "parts"):
            reader.execute(text(f"SELECT 1 FROM {table}")).all()
        with pytest.raises(UnavailableError, match=r"one long transaction .* try again"):
            migrate.upgrade(settings.database_url)
    migrate.upgrade(settings.database_url)
    migrate.require_current(settings.database_url)
    database.dispose()


@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_newer_database_is_refused_by_every_process(
    command: Callable[..., Result], settings: Settings, tmp_path: Path
) -> None:
    migrate.upgrade(settings.database_url)
    _set_revision(settings.database_url, "9999")
    refused = command("db", "upgrade", "--from-env", "--check")
    assert isinstance(refused.exception, SchemaError)
    assert "newer version of batchsvc (revision 9999)" in refused.exception.message
    env = _environment(settings)
    for module in (["batchsvc.app"], ["workers", "engine"]):  # a control worker begins as an engine worker does
        ended = subprocess.run(
            [sys.executable, "-P", "-m", *module], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 8, ended.stderr
        assert ended.stderr.splitlines()[-1] == refused.exception.message


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_process_never_upgrades_a_database_in_use(settings: Settings, tmp_path: Path) -> None:
    migrate.upgrade_to(settings.database_url, OLD)
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "batchsvc.app"],
        env=_environment(settings),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 8
    assert f"is at revision {OLD}" in ended.stderr and "batchsvc db upgrade --from-env" in ended.stderr
    assert migrate.current(settings.database_url) == OLD
    with pytest.raises(SchemaError, match="is empty"):
        migrate.require_current(f"sqlite:///{tmp_path / 'empty.sqlite3'}")


def test_a_downgrade_is_refused_with_the_way_back(command: Callable[..., Result]) -> None:
    for words in (["db", "downgrade"], ["db", "downgrade", OLD]):
        refused = command(*words)
        assert isinstance(refused.exception, CommandError)
        assert refused.exception.code == Exit.USAGE
        assert "never downgraded" in refused.exception.message and "batchsvc restore" in refused.exception.message


def test_a_data_directory_is_upgraded_only_while_nothing_runs_in_it(tmp_path: Path) -> None:
    directory = DataDir.at(tmp_path / "d")
    missing = CliRunner().invoke(app, ["db", "upgrade", "--data-dir", str(directory.root)])
    assert isinstance(missing.exception, CommandError) and "There is no database" in missing.exception.message
    directory.create()
    migrate.upgrade_to(directory.database_url, OLD)
    lock = directory.lock()
    busy = CliRunner().invoke(app, ["db", "upgrade", "--data-dir", str(directory.root)])
    assert isinstance(busy.exception, InUseError) and "batchsvc down" in busy.exception.message
    lock.release()
    done = CliRunner().invoke(app, ["db", "upgrade", "--data-dir", str(directory.root)])
    assert done.exit_code == Exit.OK
    assert migrate.schema_of(directory.database_url).pending == ()


def _environment(settings: Settings) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "AWS_ENDPOINT_URL_S3": str(settings.s3_endpoint),
        "AWS_ACCESS_KEY_ID": str(settings.s3_access_key),
        "AWS_SECRET_ACCESS_KEY": str(settings.s3_secret_key),
        "BATCHSVC_BUCKET": settings.bucket,
    }


def _set_revision(url: str, revision: str) -> None:
    database = Database(url)
    with database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :to"), {"to": revision})
    database.dispose()
