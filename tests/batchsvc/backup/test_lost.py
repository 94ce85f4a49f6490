"""Putting back what the store has lost: interrupted, while a tenant deletes, and from a disk that fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from batchsvc.backup import lost
from batchsvc.backup.manifest import BackupError
from batchsvc.backup.vault import Vault
from batchsvc.errors import UnavailableError
from batchsvc.files.tables import File
from batchsvc.store import keys
from batchsvc.tables import metadata
from tests.batchsvc.backup.conftest import Command, Env
from tests.batchsvc.backup.test_backup import made, on_sqlite, work
from tests.workers.conftest import World


@pytest.fixture
def key(world: World, here: Env, command: Command, tmp_path: Path) -> str:
    """Of an input that a backup has."""
    project_id = world.batch(work(world)).project_id
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    return keys.input_file(project_id, "file-x")


def note(world: World, **values: Any) -> None:
    with world.db.transaction() as session:
        session.execute(update(File).where(File.id == "file-x").values(**values))


def etag_of(world: World) -> str:
    with world.db.reading() as session:
        return session.scalars(select(File.etag).where(File.id == "file-x")).one()


def put_back(world: World, here: Env, vault: Vault) -> lost.PutBack:
    return lost.put_back(vault, vault.manifest(None), here["DATABASE_URL"], world.store)


@on_sqlite
def test_what_an_interrupted_run_put_back_is_named_by_the_next(
    world: World, here: Env, key: str, tmp_path: Path
) -> None:
    note(world, etag="before")
    assert put_back(world, here, Vault.for_reading(tmp_path / "b")).num_corrected == 1
    info = world.store.head(key)
    assert info is not None and etag_of(world) == info.etag


@on_sqlite
def test_each_etag_is_noted_at_once(
    world: World, here: Env, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault, real = Vault.for_reading(tmp_path / "b"), lost._put
    other = next(one.key for one in vault.objects(vault.manifest(None)) if one.key != key)
    found = vault.find({key, other})
    monkeypatch.setattr(vault, "find", lambda wanted, **_: {k: found[k] for k in (key, other) if k in wanted})
    world.store.delete([key, other])
    note(world, etag="before")

    def put(vault: Vault, store: Any, saved: Any) -> str:
        if saved.key == other:
            raise UnavailableError("The store is away.")
        return real(vault, store, saved)

    monkeypatch.setattr(lost, "_put", put)
    with pytest.raises(UnavailableError, match="away"):
        put_back(world, here, vault)
    assert etag_of(world) != "before"


@on_sqlite
def test_what_was_deleted_while_it_was_put_is_discarded(
    world: World, here: Env, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = lost._put

    def put(vault: Vault, store: Any, saved: Any) -> str:
        note(world, deleted_ms=2)
        return real(vault, store, saved)

    monkeypatch.setattr(lost, "_put", put)
    world.store.delete([key])
    put_back(world, here, Vault.for_reading(tmp_path / "b"))
    with world.db.reading() as session:
        garbage = metadata.tables["garbage"]
        assert key in session.scalars(select(garbage.c.s3_key)).all()


@on_sqlite
def test_other_bytes_and_a_failing_disk_are_told(world: World, here: Env, key: str, tmp_path: Path) -> None:
    vault = Vault.for_reading(tmp_path / "b")
    saved = vault.find({key})[key]
    path = vault.path_of(saved.sha256)
    path.write_bytes(bytes(saved.size_bytes))
    with pytest.raises(BackupError, match="changed while it was read"):
        lost._put(vault, world.store, saved)
    path.unlink()
    path.mkdir()
    for read in (vault.is_sound, lambda one: list(vault.read(one))):
        with pytest.raises(BackupError, match="can't be read"):
            read(saved)
