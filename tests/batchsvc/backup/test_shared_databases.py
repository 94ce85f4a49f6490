"""A database that others use, too: nothing of theirs gets into a backup, nor is it dropped by a restore."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from batchsvc.backup.vault import Vault
from batchsvc.batches import snapshot_queries
from batchsvc.db import postgres_snapshot
from batchsvc.db.session import Database
from batchsvc.db.snapshot import tables_of
from batchsvc.tables import metadata
from tests.batchsvc.backup.conftest import Command, Env
from tests.batchsvc.backup.test_backup import made, programs_path, refusal
from tests.batchsvc.backup.test_refusals import BOTH, backed_up, on_postgresql
from tests.workers.conftest import World

__all__ = ["backed_up"]  # a fixture


@BOTH
def test_what_others_keep_in_the_database_is_neither_copied_nor_dropped(
    backed_up: Vault, world: World, here: Env, there: Env, command: Command
) -> None:
    """A database that is shared, and one whose tables only have the names of ours."""
    world.db.dispose()
    manifest = backed_up.manifest(None)
    for env, name in ((here, "theses"), (there, "projects")):
        db = Database(env["DATABASE_URL"])
        with db.transaction() as session:
            session.execute(text(f"CREATE TABLE {name} (x INTEGER)"))
        db.dispose()
        said = refusal(command(env, "restore", backed_up.root, "--from-env", "--overwrite", path="/nowhere"))
        assert f"such as {name}" in said and "a database of its own" in said
        with db.reading() as session:
            assert not session.execute(text(f"SELECT x FROM {name}")).all(), "it is still there"
        db.dispose()
    again = made(command(here, "backup", backed_up.root, "--from-env", "--json", path=programs_path()))
    if manifest.kind == "sqlite":
        return
    assert again["kind"] == "postgresql-copy", "pg_dump would take it along"
    assert "theses" not in {file["table"] for file in again["database"]}
    db = Database(here["DATABASE_URL"])
    with db.engine.begin() as connection:
        postgres_snapshot._clear(connection, metadata.tables.keys())
        assert tables_of(connection) == {"theses"}
    db.dispose()


OF_OTHERS = (
    "CREATE SCHEMA other",
    "CREATE VIEW seen AS SELECT id FROM projects",
    "CREATE MATERIALIZED VIEW kept AS SELECT id FROM projects",
    "CREATE SEQUENCE numbers",
    "CREATE TYPE mood AS ENUM ('good')",
    "CREATE FUNCTION half(n INTEGER) RETURNS INTEGER LANGUAGE sql AS 'SELECT n / 2'",
    "CREATE EXTENSION vector",
    "CREATE PUBLICATION everything FOR ALL TABLES",
    "SELECT lo_create(0)",
)


@on_postgresql
def test_only_a_database_that_is_ours_alone_is_dumped(migrated_url: str) -> None:
    db = Database(migrated_url)
    with db.reading() as session:
        assert not postgres_snapshot._has_others(session, metadata.tables.keys())
    for statement in OF_OTHERS:
        with Session(db.engine) as session:
            session.execute(text(statement))
            assert postgres_snapshot._has_others(session, metadata.tables.keys()), statement
            session.rollback()
    db.dispose()


@pytest.mark.slow
@on_postgresql
def test_a_dump_that_has_what_others_keep_is_loaded_without_it(
    backed_up: Vault, world: World, here: Env, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versions before have made them."""
    world.db.dispose()
    db = Database(here["DATABASE_URL"])
    with db.transaction() as session:
        for statement in (*OF_OTHERS, "CREATE TABLE other.theses (x INTEGER)", "INSERT INTO other.theses VALUES (7)"):
            if "projects" not in statement:  # what stands on our tables is in their way
                session.execute(text(statement))
    db.dispose()
    with monkeypatch.context() as patched:
        patched.setattr(postgres_snapshot, "_has_others", lambda *_: False)
        again = made(command(here, "backup", backed_up.root, "--from-env", "--json", path=programs_path()))
    assert again["kind"] == "postgresql-dump"
    made(command(here, "restore", backed_up.root, "--from-env", "--overwrite", "--json", path=programs_path()))
    with db.reading() as session:
        assert session.execute(text("SELECT x FROM other.theses")).scalar_one() == 7
        assert snapshot_queries.has_projects(session)
    db.dispose()


def test_of_a_dump_what_is_of_our_tables_is_wanted() -> None:
    ours = (
        "3; 1255 16412 FUNCTION public ledger_append_only() me\n"
        "230; 1259 16385 TABLE public projects me\n"
        "231; 1259 16386 TABLE public units me\n"
        "4000; 0 0 SEQUENCE SET public projects_id_seq me\n"
        "3900; 0 16385 TABLE DATA public projects me\n"
        "3801; 2606 16400 CONSTRAINT public projects projects_pkey me\n"
        "3802; 2606 16401 FK CONSTRAINT public units units_batch_id_fkey me\n"
        "3803; 2620 16402 TRIGGER public ledger append_only me\n"
    )
    theirs = (
        ";\n; Archive created at 2026-01-01\n;\n"
        "6; 2615 16500 SCHEMA - other me\n"
        "2; 3079 16501 EXTENSION - vector \n"
        "3910; 0 0 COMMENT - EXTENSION vector \n"
        "240; 1259 16502 TABLE other projects me\n"
        "3911; 0 16502 TABLE DATA other projects me\n"
        "4; 1255 16504 FUNCTION public half(integer) me\n"
        "242; 1259 16505 SEQUENCE public numbers me\n"
        "241; 1259 16503 MATERIALIZED VIEW public kept me\n"
        "3912; 0 16503 MATERIALIZED VIEW DATA public kept me\n"
    )
    assert postgres_snapshot._ours_of(theirs + ours, ["projects", "units"]) == ours


@on_postgresql
def test_a_database_is_empty_that_has_what_came_with_an_extension(
    backed_up: Vault, there: Env, command: Command
) -> None:
    db = Database(there["DATABASE_URL"])
    with db.transaction() as session:
        for kind, name in (("TABLE", "systems"), ("VIEW", "statistics")):
            what = "(x INTEGER)" if kind == "TABLE" else "AS SELECT 1 AS x"
            session.execute(text(f"CREATE {kind} {name} {what}"))
            session.execute(text(f"ALTER EXTENSION plpgsql ADD {kind} {name}"))
    db.dispose()
    made(command(there, "restore", backed_up.root, "--from-env", "--json", path="/nowhere"))


@on_postgresql
def test_what_stands_on_our_tables_is_named_and_stops_a_restore(
    backed_up: Vault, world: World, here: Env, command: Command
) -> None:
    world.db.dispose()
    with world.db.transaction() as session:
        session.execute(text("CREATE SCHEMA other"))
        session.execute(text("CREATE VIEW other.theirs AS SELECT id FROM projects"))
    world.db.dispose()
    said = refusal(command(here, "restore", backed_up.root, "--from-env", "--overwrite", path="/nowhere"))
    assert "The database refused: " in said and "view other.theirs depends on table projects" in said
    assert "nothing was changed" in said
    with world.db.reading() as session:
        assert snapshot_queries.has_projects(session)
