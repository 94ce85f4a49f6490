"""What a restore refuses, each with one sentence and nothing changed; and what a backup refuses to be."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from batchsvc.accounts.tables import Project
from batchsvc.backup import restoring
from batchsvc.backup.manifest import SavedObject
from batchsvc.backup.vault import Vault
from batchsvc.batches import snapshot_queries
from batchsvc.cli.exits import CommandError
from batchsvc.db import migrate, postgres_snapshot
from batchsvc.db.session import Database
from batchsvc.errors import UnavailableError
from batchsvc.files.tables import TenantStore
from batchsvc.sealing import Seals
from batchsvc.settings import Settings
from batchsvc.stack.datadir import DataDir
from batchsvc.store.s3 import ObjectStore
from tests import servers
from tests.batchsvc.backup.conftest import Command, Env
from tests.batchsvc.backup.test_backup import made, on_sqlite, refusal, work
from tests.workers.conftest import World

on_postgresql = pytest.mark.parametrize("migrated_url", ["postgresql"], indirect=True)
BOTH = pytest.mark.parametrize("migrated_url", ["sqlite", "postgresql"], indirect=True)
MOSTLY_SQLITE = pytest.mark.parametrize(
    "migrated_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture
def backed_up(world: World, here: Env, command: Command, tmp_path: Path) -> Vault:
    """A finished backup of a deployment in mid-batch."""
    work(world)
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json", path="/nowhere"))
    return Vault(tmp_path / "b")


def _drop_object(vault: Vault) -> None:
    next(iter(vault._objects.glob("??/*"))).unlink()


def _shorten_object(vault: Vault) -> None:
    path = next(iter(vault._objects.glob("??/*")))
    path.write_bytes(path.read_bytes()[:-1])


def _flip_bit(vault: Vault) -> None:
    path = next(iter(vault._objects.glob("??/*")))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def _drop_manifest(vault: Vault) -> None:
    (vault.folder(vault.finished()[-1]) / "manifest.json").unlink()


def _break_manifest(vault: Vault) -> None:
    (vault.folder(vault.finished()[-1]) / "manifest.json").write_bytes(b"{")


def _break_list(vault: Vault) -> None:
    path = vault.folder(vault.finished()[-1]) / "objects.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-3])


def _drop_database(vault: Vault) -> None:
    next(iter(vault.folder(vault.finished()[-1]).glob("database*"))).unlink()


def _change(name: str, value: object) -> Callable[[Vault], None]:
    def change(vault: Vault) -> None:
        path = vault.folder(vault.finished()[-1]) / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {name: value}))

    return change


HARMS: list[tuple[Callable[[Vault], None], str]] = [
    (_drop_object, r"half-copied: 1 of \d+ objects are missing or have another size \(the first: (batch|in)/"),
    (_shorten_object, "half-copied: 1 of"),
    (_flip_bit, r"damaged: 1 of \d+ objects have other bytes than they had \(the first: (batch|in)/"),
    (_drop_manifest, "was never finished"),
    (_break_manifest, "manifest can't be read"),
    (_break_list, "objects.jsonl.zst is missing or damaged"),
    (_drop_database, "database.sqlite3.zst is missing or damaged"),
    (_change("revision", "9999"), "made by a newer version .* never downgraded"),
    (_change("format", 2), "format 2 and this version reads 1"),
    (_change("kind", "postgresql-dump"), "is of PostgreSQL and the target is SQLite"),
]


@on_sqlite
def test_a_backup_that_is_not_whole_changes_nothing(
    backed_up: Vault, there: Env, command: Command, tmp_path: Path
) -> None:
    assert command(there, "restore", backed_up.root, "--check").exit_code == 0
    store = ObjectStore(Settings.from_env(there))
    store.ensure_bucket()
    for number, (harm, says) in enumerate(HARMS):
        harmed = Vault(shutil.copytree(backed_up.root, tmp_path / f"harmed-{number}"))
        harm(harmed)
        if "target is" not in says:
            checked = refusal(command(there, "restore", harmed.root, "--check"))
            assert re.search(says, checked), checked
        if harm is _flip_bit:
            shutil.rmtree(harmed.root)  # the check has moved it aside
            harm(Vault(shutil.copytree(backed_up.root, harmed.root)))
        said = refusal(command(there, "restore", harmed.root, "--from-env"))
        assert re.search(says, said), said
        assert not Path(there["DATABASE_URL"].removeprefix("sqlite:///")).exists()
        assert not list(store.list_keys("")), "nothing was copied"


@on_sqlite
def test_a_damaged_object_is_copied_again_after_a_check(backed_up: Vault, here: Env, command: Command) -> None:
    _flip_bit(backed_up)
    first = made(command(here, "backup", backed_up.root, "--from-env", "--json"))
    assert first["num_copied"] == 0, "its size is what it was"
    with Vault.for_writing(backed_up.root):
        said = refusal(command(here, "restore", backed_up.root, "--check"))
    assert "They can't be moved aside: Another backup is being written" in said
    said = refusal(command(here, "restore", backed_up.root, "--check"))
    assert f"They lie in {backed_up.damaged} now: make a backup" in said
    assert len(list(backed_up.damaged.iterdir())) == 1
    second = made(command(here, "backup", backed_up.root, "--from-env", "--json", "--keep", 2))
    assert second["num_copied"] >= 1 and not backed_up.damaged.exists(), "what users sent isn't kept for ever"
    assert command(here, "restore", backed_up.root, "--check").exit_code == 0


@BOTH
def test_a_deployment_that_runs_is_refused_with_how_to_stop_it(backed_up: Vault, here: Env, command: Command) -> None:
    db = Database(here["DATABASE_URL"])
    with db.reading() as session:  # an API, or a worker
        session.execute(text("SELECT 1 FROM projects")).all()
        said = refusal(command(here, "restore", backed_up.root, "--from-env", "--overwrite"))
    db.dispose()
    assert "stop the API, the control and the engine workers" in said


@MOSTLY_SQLITE
def test_a_place_that_is_not_empty_is_refused_unless_told(
    backed_up: Vault, there: Env, command: Command, tmp_path: Path
) -> None:
    first = made(command(there, "restore", backed_up.root, "--from-env", "--json", path="/nowhere"))
    assert "The database isn't empty" in refusal(command(there, "restore", backed_up.root, "--from-env"))
    again = made(command(there, "restore", backed_up.root, "--from-env", "--overwrite", "--json", path="/nowhere"))
    assert (again["num_objects"], again["num_copied"]) == (first["num_objects"], 0), "the objects were there"
    if there["DATABASE_URL"].startswith("sqlite"):
        elsewhere = there | {"DATABASE_URL": f"sqlite:///{tmp_path / 'elsewhere.sqlite3'}"}
        store = ObjectStore(Settings.from_env(there))
        store.put("batch/another/part", b"of another service")
        said = refusal(command(elsewhere, "restore", backed_up.root, "--from-env"))
        assert "isn't empty (it holds batch/another/part)" in said
        store.delete(["batch/another/part"])
        broken_off = made(command(elsewhere, "restore", backed_up.root, "--from-env", "--json"))
        assert broken_off["num_copied"] == 0, "what an interrupted restore has left is no obstacle"


@on_postgresql
def test_programs_of_another_version_are_not_used(
    backed_up: Vault, world: World, here: Env, command: Command, tmp_path: Path
) -> None:
    """What another pg_restore sends, a server may refuse: COPY takes its place, or nothing is touched."""
    database = Database(here["DATABASE_URL"])
    with database.reading() as session:
        major = postgres_snapshot._server_major(session)
    database.dispose()
    _program(tmp_path / "pg_dump", f"echo 'pg_dump (PostgreSQL) {major + 1}.1'")
    said = made(command(here, "backup", backed_up.root, "--from-env", "--json", path=str(tmp_path)))
    assert said["kind"] == "postgresql-copy"
    world.db.dispose()
    _change("kind", "postgresql-dump")(backed_up)
    words = ("restore", backed_up.root, "--from-env", "--overwrite")
    _program(tmp_path / "pg_restore", f"echo 'pg_restore (PostgreSQL) {major + 1}.1'")
    refused = refusal(command(here, *words, path=str(tmp_path)))
    assert f"install the client programs of PostgreSQL {major}, which the server is of" in refused
    old = f"[ $1 = --version ] && echo 'pg_restore (PostgreSQL) {major}.1' || {{ echo too new >&2; exit 1; }}"
    _program(tmp_path / "pg_restore", old)
    refused = refusal(command(here, *words, path=str(tmp_path)))
    assert "pg_restore can't read what pg_dump wrote (too new). Nothing was dropped" in refused
    with database.reading() as session:
        assert snapshot_queries.has_projects(session)
    database.dispose()


def _program(path: Path, does: str) -> None:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)


@on_postgresql
def test_a_copy_that_cannot_be_loaded_leaves_the_database_as_it_was(
    backed_up: Vault, world: World, here: Env, command: Command
) -> None:
    world.db.dispose()
    manifest = json.loads((backed_up.folder(backed_up.finished()[-1]) / "manifest.json").read_bytes())
    *files, last = manifest["database"]
    _change("database", [*files, last | {"columns": [*last["columns"], "strange"]}])(backed_up)
    said = refusal(command(here, "restore", backed_up.root, "--from-env", "--overwrite", path="/nowhere"))
    assert f'column "strange" of relation "{last["table"]}" does not exist' in said and "nothing was changed" in said
    with world.db.reading() as session:
        assert snapshot_queries.has_projects(session)
    migrate.require_current(here["DATABASE_URL"])


def test_programs_inherit_what_the_url_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGSSLROOTCERT": "/ca.pem", "PGHOST": "elsewhere", "PGPASSWORD": "inherited"}.items():
        monkeypatch.setenv(name, value)
    env = postgres_snapshot._environment("postgresql+psycopg://me@db.example:6432/batches?sslmode=verify-full")
    asked = ("PGSSLROOTCERT", "PGHOST", "PGPORT", "PGUSER", "PGPASSWORD", "PGDATABASE", "PGSSLMODE")
    expected = ["/ca.pem", "db.example", "6432", "me", "inherited", "batches", "verify-full"]
    assert [env[name] for name in asked] == expected


def test_a_service_in_the_address_sends_no_program_anywhere() -> None:
    """pg_restore was told the database that is the user's by default, which came before the service's."""
    served = "postgresql+psycopg://me@db.example/?service=ours"
    with pytest.raises(UnavailableError, match=r"names a service of libpq's.*write its host"):
        postgres_snapshot.restoring_program(served)


def test_a_service_does_not_send_programs_elsewhere_than_the_url(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """libpq takes a service's file before PG* variables."""
    file = tmp_path / "services.conf"
    file.write_text("[ours]\nhost=elsewhere\nport=1\npassword=of-service\nsslrootcert=/ca.pem\n")
    for name, value in {"PGSERVICEFILE": str(file), "PGSERVICE": "ours", "PGPASSWORD": "inherited"}.items():
        monkeypatch.setenv(name, value)
    env = postgres_snapshot._environment("postgresql+psycopg://me@db.example/batches")
    assert "PGSERVICE" not in env
    asked = ("PGHOST", "PGPORT", "PGUSER", "PGPASSWORD", "PGDATABASE", "PGSSLROOTCERT")
    assert [env[name] for name in asked] == ["db.example", "1", "me", "of-service", "batches", "/ca.pem"]


def _gone(database_url: str) -> None:
    """Wait until a PostgreSQL counts no sessions that have just ended."""
    if not database_url.startswith("sqlite"):
        _until_connected(database_url, 0)


def _until_connected(database_url: str, others: int) -> None:
    deadline = time.monotonic() + 30
    while (counted := postgres_snapshot.others_connected(database_url)) != others:
        assert time.monotonic() < deadline, f"{counted} others"
        time.sleep(0.05)


@BOTH
def test_whoever_comes_while_objects_are_copied_is_noticed(
    backed_up: Vault, there: Env, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, come = restoring._put, threading.Lock()

    def meddling(vault: Vault, store: ObjectStore, saved: SavedObject) -> tuple[str, bool]:
        if come.acquire(blocking=False):
            migrate.upgrade(there["DATABASE_URL"])
            database = Database(there["DATABASE_URL"])
            with database.transaction() as session:
                session.add(Project(id="p", name="new", salt="s", created_ms=1))
            database.dispose()
            _gone(there["DATABASE_URL"])
        return put(vault, store, saved)

    monkeypatch.setattr(restoring, "_put", meddling)
    said = refusal(command(there, "restore", backed_up.root, "--from-env", path="/nowhere"))
    assert "The database isn't empty" in said and "--overwrite" in said
    database = Database(there["DATABASE_URL"])
    with database.reading() as session:
        assert session.get_one(Project, "p").name == "new"
    database.dispose()


@on_sqlite
def test_a_database_takes_its_place_when_it_is_settled(
    backed_up: Vault, there: Env, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that ends in the middle of it has restored nothing."""

    def fail(*_: object, **__: object) -> None:
        raise UnavailableError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(restoring, "record", fail)
        assert refusal(command(there, "restore", backed_up.root, "--from-env")) == "killed"
    assert not list(tmp_path.glob("*there.sqlite3*")), "nor is its copy left"
    made(command(there, "restore", backed_up.root, "--from-env", "--json"))


@on_sqlite
def test_a_schema_without_anybody_is_empty(backed_up: Vault, there: Env, command: Command) -> None:
    migrate.upgrade(there["DATABASE_URL"])
    made(command(there, "restore", backed_up.root, "--from-env", "--json"))


@on_sqlite
def test_a_data_directory_with_a_stack_is_refused(
    backed_up: Vault, here: Env, command: Command, tmp_path: Path
) -> None:
    directory = DataDir.at(tmp_path / "d")
    directory.create()
    lock = directory.lock()
    said = refusal(command(here, "restore", backed_up.root, "--data-dir", directory.root))
    lock.release()
    assert f"batchsvc down --data-dir {directory.root}" in said


@on_sqlite
def test_a_backup_is_not_mixed_with_other_things(here: Env, world: World, command: Command, tmp_path: Path) -> None:
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    with Vault.for_writing(tmp_path / "disk") as vault:
        assert vault.finished() == []
    (tmp_path / "thesis.txt").write_text("mine")
    assert "holds something else than backups" in refusal(command(here, "backup", tmp_path, "--from-env"))
    assert "There is no backup in" in refusal(command(here, "restore", tmp_path / "none", "--from-env"))
    with Vault.for_writing(tmp_path / "b"):
        said = refusal(command(here, "backup", tmp_path / "b", "--from-env"))
    assert "Another backup is being written" in said


@on_sqlite
def test_a_damaged_database_is_not_backed_up(here: Env, world: World, command: Command, tmp_path: Path) -> None:
    work(world)
    world.db.dispose()
    path = Path(here["DATABASE_URL"].removeprefix("sqlite:///"))
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        root = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'ix_units_lease'").fetchone()[0]
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    connection.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * size)
        file.write(b"\xff" * size)
    refused = command(here, "backup", tmp_path / "b", "--from-env")
    assert refused.exit_code == 1 and "damaged" in str(refused.exception)
    assert not Vault(tmp_path / "b").finished()


@on_sqlite
def test_an_older_schema_is_copied_only_while_nothing_runs(
    here: Env, there: Env, command: Command, tmp_path: Path
) -> None:
    old = here | {"DATABASE_URL": f"sqlite:///{tmp_path / 'old.sqlite3'}"}
    migrate.upgrade_to(old["DATABASE_URL"], "0011")
    refused = command(old, "backup", tmp_path / "b", "--from-env")
    assert isinstance(refused.exception, CommandError)
    assert "is at revision 0011" in refused.exception.message and "--stopped" in refused.exception.message
    ObjectStore(Settings.from_env(old)).ensure_bucket()
    assert made(command(old, "backup", tmp_path / "b", "--from-env", "--stopped", "--json"))["revision"] == "0011"
    made(command(there, "restore", tmp_path / "b", "--from-env", "--json"))
    assert migrate.schema_of(there["DATABASE_URL"]).pending == (), "a restore upgrades"


@on_sqlite
def test_a_secret_is_in_a_backup_only_if_asked(
    world: World, here: Env, there: Env, command: Command, tmp_path: Path
) -> None:
    batch = world.batch(work(world))
    sealed = Seals.of(servers.SECRET_KEY).seal("a tenant's key", "the store st")
    with world.db.transaction() as session:
        names = {"bucket": "b", "prefix": "", "region": "r", "access_key": "a", "secret_key": ""}
        row = TenantStore(
            id="st", project_id=batch.project_id, sealed_secret=sealed, created_ms=1, updated_ms=1, **names
        )
        session.add(row)
    plain = command(here, "backup", tmp_path / "plain", "--from-env")
    assert "--include-secrets" in plain.stdout
    other = there | {"BATCHSVC_SECRET_KEY": "quite another key that opens nothing of it"}
    back = command(other, "restore", tmp_path / "plain", "--from-env")
    assert back.exit_code == 0
    assert "The secrets of 1 registered stores can't be opened: add the key that sealed them" in back.stdout
    for folder, has_key in (("plain", False), ("full", True)):
        if has_key:
            assert made(command(here, "backup", tmp_path / folder, "--from-env", "--include-secrets", "--json"))
        everything = b"".join(path.read_bytes() for path in (tmp_path / folder).rglob("*") if path.is_file())
        assert (servers.SECRET_KEY.encode() in everything) == has_key
    kept = next((tmp_path / "full" / "backups").glob("*/secrets.json"))
    assert kept.stat().st_mode & 0o777 == 0o600 and (tmp_path / "full").stat().st_mode & 0o777 == 0o700
    both = other | {"BATCHSVC_SECRET_KEY": f"{other['BATCHSVC_SECRET_KEY']},{servers.SECRET_KEY}"}
    opened = made(command(both, "restore", tmp_path / "full", "--from-env", "--overwrite", "--json"))
    assert opened["num_sealed_shut"] == 0


@on_postgresql
def test_sessions_of_other_roles_are_seen_by_one_that_may_see_little_of_them(migrated_url: str) -> None:
    role = f"r_{secrets.token_hex(4)}"
    db = Database(migrated_url)
    with db.engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
    try:
        theirs = re.sub("//[^@/]*@", f"//{role}@", migrated_url)
        db.dispose()
        _until_connected(theirs, 0)
        with db.engine.connect():
            _until_connected(theirs, 1)
    finally:
        with db.engine.begin() as connection:
            connection.execute(text(f"DROP ROLE {role}"))
        db.dispose()
