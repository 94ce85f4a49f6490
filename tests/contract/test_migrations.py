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
from sqlalchemy.exc import DBAPIError

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


def test_processes_that_start_at_once_migrate_once(database_url: str, tmp_path: Path) -> None:
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
        for _ in range(2)  # four of them: row 72 of tests/faults
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


def test_what_older_refunds_and_invoices_correct_is_noted(database_url: str) -> None:
    """By what a batch had used when it was refunded, and by what an issued invoice said; down and up again alike."""
    database = Database(database_url)
    december, january, february, march = 1_701_388_800_000, 1_704_067_200_000, 1_706_745_600_000, 1_709_251_200_000
    rows: list[tuple[str, dict[str, object]]] = [("projects", {"id": "p", "name": "n", "salt": "s", "weight": 1})]
    rows += [("batches", {"id": batch, "project_id": "p", "status": "completed"}) for batch in ("b1", "b2")]
    for part, batch, ms, cost in (
        ("q0", "b1", december, 7),
        ("q1", "b1", january, 100),
        ("q2", "b2", february - 1, 60),
        ("void:q1", "b1", february + 1, -100),
        ("void:q0", "b1", february + 2, -7),
        ("q3", "b2", march, 5),
    ):
        usage = {"part_id": part, "batch_id": batch, "created_ms": ms, "cost_nanos": cost, "model": "m", "tier": "t"}
        rows.append(("usage", usage | {"project_id": "p"}))
    for no, (owner, amount) in enumerate((("b1", 1), ("b2", 60), (None, 3)), 1):
        posting = {"id": no, "kind": "refund", "key": f"r{no}", "batch_id": owner, "created_ms": february + 3}
        rows.append(("ledger_transactions", posting | {"project_id": "p"}))
        for side, (account, sign) in enumerate((("revenue", -1), ("available:p", 1))):
            entry = {"id": 2 * no + side, "transaction_id": no, "account": account, "amount_nanos": sign * amount}
            rows.append(("ledger_entries", entry))
    for name, month in (("i1", "2024-01"), ("i2", "2024-02"), ("draft", "2024-02")):
        invoice: dict[str, object] = {"id": name, "project_id": "p", "status": "draft", "kind": "invoice"}
        rows.append(("invoices", invoice | {"month": month, "projects": "[]", "seller": "{}", "buyer": "{}"}))
        if month == "2024-02":
            for no, line in enumerate(
                (
                    {"kind": "refund", "batch_id": "b1", "amount_nanos": -1, "reverses": "INV-1"},
                    {"kind": "refund", "batch_id": "b2", "amount_nanos": -60, "reverses": "INV-1"},
                    {"kind": "refund", "amount_nanos": -3},
                    {"kind": "input", "model": "m", "tier": "t", "amount_nanos": -100, "reverses": "INV-1"},
                    {"kind": "input", "model": "m", "tier": "t", "amount_nanos": -7, "reverses": "2023-12"},
                )
            ):
                rows.append(("invoice_lines", {"invoice_id": name, "no": no, "project_id": "p"} | line))
    with database.engine.begin() as connection:
        command.upgrade(migrate._config(connection), "0004")
        for table, values in rows:
            connection.execute(*_old_row(connection, table, values))
        for no in (1, 2):
            issue = text("UPDATE invoices SET status = 'issued', number = :number WHERE id = :id")
            connection.execute(issue, {"id": f"i{no}", "number": f"INV-{no}"})
    for _ in range(2):
        with database.engine.begin() as connection:
            command.upgrade(migrate._config(connection), "0005")
            months = connection.execute(text("SELECT key, corrects_month FROM ledger_transactions ORDER BY key")).all()
            noted = connection.execute(text("SELECT * FROM invoice_corrections ORDER BY key")).all()
        assert list(map(tuple, months)) == [("r1", "2024-01"), ("r2", "2024-01"), ("r3", None)]
        assert list(map(tuple, noted)) == [
            ("i2", "r1", "INV-1"),
            ("i2", "r2", "INV-1"),
            ("i2", "void:q0", "2023-12"),
            ("i2", "void:q1", "INV-1"),
        ]
        _is_frozen(database, "UPDATE invoice_corrections SET corrects = 'x'")
        with database.engine.begin() as connection:
            command.downgrade(migrate._config(connection), "0004")
            assert "invoice_corrections" not in inspect(connection).get_table_names()
        for frozen in ("ledger_transactions SET kind = 'x'", "invoice_lines SET amount_nanos = 0"):
            _is_frozen(database, f"UPDATE {frozen}")
    database.dispose()


def test_hours_of_usage_are_sums_of_rows_that_differ_in_more_than_their_key(database_url: str) -> None:
    database = Database(database_url)
    row = {"batch_id": "b", "project_id": "p", "created_ms": 3_600_000, "tier": "t", "endpoint": "/v1"}
    hours = text("SELECT model, requests FROM usage_hours ORDER BY model")
    with database.engine.begin() as connection:
        command.upgrade(migrate._config(connection), "0008")
        for part, model, version in (("1", "m", 0), ("2", "m", 1), ("3", "n", 1)):
            values = {**row, "part_id": part, "model": model, "price_version": version, "requests": 2}
            connection.execute(*_old_row(connection, "usage", values))
        command.upgrade(migrate._config(connection), "0009")
        assert [tuple(found) for found in connection.execute(hours)] == [("m", 4), ("n", 2)]
        command.downgrade(migrate._config(connection), "0008")
        assert [tuple(found) for found in connection.execute(hours)] == [("m", 6)]
    database.dispose()


def _is_frozen(database: Database, statement: str) -> None:
    with pytest.raises(DBAPIError, match=r"append-only|never changes"), database.engine.begin() as connection:
        connection.execute(text(statement))


def _old_row(connection: Connection, table: str, values: dict[str, object]) -> tuple[TextClause, dict[str, object]]:
    """An insert in the words of the old schema: what isn't named is zero, empty or null."""
    row = dict(values)
    for column in inspect(connection).get_columns(table):
        if column["name"] not in row and not column["nullable"]:
            kind = column["type"].python_type
            row[column["name"]] = {int: 0, str: "", bytes: b"\0", bool: False}[kind]
    names = ", ".join(row)
    return text(f"INSERT INTO {table} ({names}) VALUES ({', '.join(':' + name for name in row)})"), row
