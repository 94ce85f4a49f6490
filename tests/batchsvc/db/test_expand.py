"""Migrations only expand, so that processes of a release run on beside those of the next one."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import inspect

from batchsvc.db import migrate
from batchsvc.db.session import Database

OLDEST = "0011"  # of the first release: whatever came before has no processes any more


def columns_of(url: str) -> dict[str, dict[str, dict[str, Any]]]:
    database = Database(url)
    found = inspect(database.engine)
    columns = {name: {row["name"]: dict(row) for row in found.get_columns(name)} for name in found.get_table_names()}
    database.dispose()
    return columns


def test_old_processes_find_all_that_they_name_and_may_leave_out_what_is_new(database_url: str) -> None:
    migrate.upgrade_to(database_url, OLDEST)
    before = columns_of(database_url)
    migrate.upgrade(database_url)
    after = columns_of(database_url)
    assert len(after) > len(before) > 30, "it looks at both"
    for table, columns in before.items():
        assert table in after, f"{table} is gone: old processes still read it"
        for name, old in columns.items():
            new = after[table].get(name)
            assert new is not None, f"{table}.{name} is gone: old processes still name it"
            assert str(new["type"]) == str(old["type"]) or _is_wider(new, old), f"{table}.{name} has another type"
            assert old["nullable"] <= new["nullable"] or new["default"] is not None, f"{table}.{name} forbids null"
        for name in after[table].keys() - columns.keys():
            new = after[table][name]
            is_free = new["nullable"] or new["default"] is not None
            assert is_free, f"old processes can't insert into {table}: they don't know {name}, which has no default"


def _is_wider(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether a text may only be longer than before."""
    lengths = [getattr(row["type"], "length", None) for row in (new, old)]
    return type(new["type"]) is type(old["type"]) and None not in lengths and lengths[0] > lengths[1]


def test_what_older_versions_deleted_leaves_sqlite_s_file(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite3"
    migrate.upgrade_to(f"sqlite:///{path}", OLDEST)
    connection = sqlite3.connect(path)
    for statement in (
        "PRAGMA secure_delete=OFF",
        "CREATE TABLE words (word TEXT)",
        "INSERT INTO words VALUES ('canary-3d1f')",
        "DROP TABLE words",
    ):
        connection.execute(statement)
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    assert b"canary-3d1f" in path.read_bytes()
    migrate.upgrade(f"sqlite:///{path}")
    assert not [file.name for file in tmp_path.iterdir() if b"canary-3d1f" in file.read_bytes()]


def test_where_it_could_not_leave_the_file_the_command_that_does_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "an old one.sqlite3"
    migrate.upgrade_to(f"sqlite:///{path}", OLDEST)
    monkeypatch.setattr(Database, "forget_freed", lambda _: False)  # somebody reads it, or its disk is full
    migrate.upgrade(f"sqlite:///{path}")
    assert f"run: sqlite3 '{path}' VACUUM\n" in capsys.readouterr().err
