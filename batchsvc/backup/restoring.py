"""Makes a service out of a backup: all of it is checked first, then come the objects, and last the database.

Nothing is changed before the whole backup has been read and found sound, and nobody finds a database before all that it
names is in the bucket; so a restore that is broken off has restored nothing, and is simply run again. Afterwards
nothing is leased, and an older schema is upgraded.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import at_command_line
from batchsvc.audit.service import record
from batchsvc.backup.manifest import BackupError, Manifest, SavedObject
from batchsvc.backup.vault import Vault
from batchsvc.batches import snapshot_queries
from batchsvc.clock import monotonic_s
from batchsvc.db import migrate, snapshot
from batchsvc.db.migrate import SchemaError
from batchsvc.db.session import Database, database_now_ms
from batchsvc.db.snapshot import SnapshotFile
from batchsvc.files import store_service
from batchsvc.sealing import Seals
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.pieces import put_pieces
from batchsvc.store.s3 import ObjectStore
from batchsvc.tables import metadata

T = TypeVar("T")

_THREADS, _WINDOW = 8, 256
_LINGER_S = 3.0
_PREFIXES = (keys.INPUTS, keys.UPLOADS, keys.BATCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came of it. `num_sealed_shut`: secrets of stores that this deployment's key doesn't open."""

    num_objects: int
    num_copied: int
    unfinished_batches: int
    num_sealed_shut: int
    num_missing: int


def check_source(
    vault: Vault, manifest: Manifest, say: Callable[[str], None], *, set_aside: bool = False
) -> list[SavedObject]:
    """The objects of a backup that is whole and readable here. Raises SchemaError or BackupError for one that isn't.

    `set_aside`: objects with other bytes are moved out of the way, so that the next backup copies them again.
    """
    if not migrate.is_known(manifest.revision):
        raise SchemaError(
            f"The backup was made by a newer version ({manifest.made_by}, revision {manifest.revision}): a database is "
            "never downgraded, so install that version to restore it."
        )
    for file in (*manifest.database, manifest.objects):
        vault.check(manifest.name, file)
    every = list(vault.objects(manifest))
    saved = [one for one in every if one.sha256]
    if len(saved) != manifest.num_objects:
        raise BackupError(f"The backup's list has {len(saved)} of {manifest.num_objects} objects: use another backup.")
    say(f"Checking {len(saved):,} objects ({manifest.num_bytes / 1e6:,.1f} MB).")
    missing = [one.key for one in saved if not vault.has(one)]
    if missing:
        raise BackupError(
            f"The backup is half-copied: {len(missing):,} of {len(saved):,} objects are missing or have another size "
            f"(the first: {missing[0]}). Nothing was changed; copy {vault.root} whole, or use another backup."
        )
    sound = _in_threads(vault.is_sound, saved)
    damaged = [one for one, is_sound in zip(saved, sound, strict=True) if not is_sound]
    if damaged:
        told = (
            f"The backup is damaged: {len(damaged):,} of {len(saved):,} objects have other bytes than they had (the "
            f"first: {damaged[0].key}). "
        )
        if set_aside:
            try:
                vault.set_aside(damaged)
            except BackupError as error:
                raise BackupError(f"{told}They can't be moved aside: {error.message}") from error
            raise BackupError(
                f"{told}They lie in {vault.damaged} now: make a backup, which copies again those that the service "
                f"still has, or use another copy of {vault.root}."
            )
        raise BackupError(
            f"{told}Nothing was changed; use another copy of {vault.root}, or another backup. (`restore --check` moves "
            "them aside, so that the next backup copies them again.)"
        )
    return saved


def check_database(manifest: Manifest, settings: Settings, *, overwrite: bool) -> None:
    """Raises BackupError if somebody works with the database, if it has tables of somebody else's, or (unless told to
    overwrite) if it isn't empty; UnavailableError if pg_restore is needed, and none that the server takes is here."""
    url = settings.database_url
    if snapshot.family(url) != snapshot.family(manifest.kind):
        raise BackupError(
            f"The backup is of {snapshot.family(manifest.kind)} and the target is {snapshot.family(url)}: restore it "
            + ("with --from-env into PostgreSQL." if snapshot.family(url) == "SQLite" else "into SQLite.")
        )
    _refuse_running(url)
    if _look(url) and not overwrite:
        raise BackupError(
            "The database isn't empty: restore into a fresh one, or say --overwrite, which drops what it holds (also "
            "after a restore that was broken off here)."
        )
    if manifest.kind == "postgresql-dump":
        from batchsvc.db.postgres_snapshot import restoring_program

        restoring_program(url)


def check_bucket(saved: list[SavedObject], store: ObjectStore, *, overwrite: bool) -> None:
    """Raises BackupError if the bucket has other objects than the backup, unless told to overwrite."""
    store.ensure_bucket()
    ours = {one.key for one in saved}  # an interrupted restore has left these
    found = (key for prefix in _PREFIXES for key, _ in store.list_keys(prefix))
    other = next((key for key in found if key not in ours), None)
    if other is not None and not overwrite:
        raise BackupError(
            f"The bucket {store.bucket} isn't empty (it holds {other}): restore into a fresh one, or say --overwrite, "
            "which replaces the objects that the backup has and leaves all others to the collection of garbage."
        )


def restore(
    vault: Vault,
    manifest: Manifest,
    saved: list[SavedObject],
    settings: Settings,
    store: ObjectStore,
    *,
    seals: Seals,
    overwrite: bool,
    shift_deadlines: bool,
    say: Callable[[str], None] = lambda _text: None,
) -> Restored:
    """Put a checked backup in place. Raises UnavailableError when database or store don't answer, and BackupError if
    somebody came to the database since it was checked."""
    say(f"Copying {len(saved):,} objects into the bucket {store.bucket}.")
    etags: dict[str, str] = {}
    num_copied = 0
    for one, (etag, is_new) in zip(saved, _in_threads(partial(_put, vault, store), saved), strict=True):
        num_copied += is_new
        if etag != one.etag:
            etags[one.key] = etag
    say("Loading the database.")
    url = settings.database_url
    files = [
        SnapshotFile(
            name=file.name,
            pieces=partial(vault.unpacked, manifest.name, file),
            table=file.table,
            columns=file.columns,
        )
        for file in manifest.database
    ]
    found: list[tuple[int, int]] = []

    def settle(session: Session) -> int:
        now = database_now_ms(session)
        later_ms = max(0, now - manifest.created_ms) if shift_deadlines else 0
        gone = sorted(set(snapshot_queries.passing_keys(session)).difference(one.key for one in saved))
        unfinished = snapshot_queries.settle(session, etags=etags, gone=gone, later_ms=later_ms)
        told: dict[str, str | int] = {
            "made_by": manifest.made_by,
            "made_ms": manifest.created_ms,
            "objects": len(saved),
        }
        record(session, at_command_line(), Action.BACKUP_RESTORED, manifest.name, details=told)
        return unfinished

    def settle_at(loaded_url: str) -> None:
        migrate.upgrade(loaded_url)
        db = Database(loaded_url)
        try:
            unfinished = db.run(settle)
            with db.reading() as session:
                found.append((unfinished, store_service.num_sealed_shut(session, seals)))
        finally:
            db.dispose()

    with tempfile.TemporaryDirectory(prefix="batchsvc-restore-") as scratch:
        check_database(manifest, settings, overwrite=overwrite)  # again: much time has passed
        ours = metadata.tables.keys()
        snapshot.load(url, manifest.kind, manifest.revision, files, Path(scratch), ours, settle=settle_at)
    ((unfinished, shut),) = found
    return Restored(
        num_objects=len(saved),
        num_copied=num_copied,
        unfinished_batches=unfinished,
        num_sealed_shut=shut,
        num_missing=manifest.num_missing,
    )


def _refuse_running(url: str) -> None:
    if snapshot.family(url) == "SQLite":
        from batchsvc.db.sqlite_snapshot import is_in_use

        if is_in_use(url):
            raise BackupError(
                "A process has the database open: stop the API, the control and the engine workers, and try again."
            )
        return
    from batchsvc.db.postgres_snapshot import others_connected

    deadline = monotonic_s() + _LINGER_S
    while (others := others_connected(url)) and monotonic_s() < deadline:
        time.sleep(0.1)  # whoever has just ended may still be counted
    if others:
        raise BackupError(
            f"The database has {others} other connections, so a stack seems to be running: stop the API, the control "
            "and the engine workers (and a psql, if one is open), and try again."
        )


def _look(url: str) -> bool:
    """Whether anybody's work is in the database. Raises BackupError if it has tables that aren't this service's."""
    if snapshot.family(url) == "SQLite":
        from batchsvc.db.sqlite_snapshot import path_of

        if not path_of(url).exists():
            return False
    db = Database(url)
    try:
        with db.reading() as session:
            names = snapshot.tables_of(session.connection())
            others = sorted(snapshot.others_of(session.connection(), metadata.tables.keys()))
            if names and not others and not _is_ours(session, names):
                others = sorted(names)
            if others:
                raise BackupError(
                    f"The database holds tables that aren't this version's (such as {others[0]}), and no restore drops "
                    "these: restore into a database of its own."
                )
            return "projects" in names and snapshot_queries.has_projects(session)
    finally:
        db.dispose()


def _is_ours(session: Session, names: set[str]) -> bool:
    """Whether our migrations made the tables: then there is a revision of ours, and none without any table."""
    if "alembic_version" not in names:
        return False
    revisions = snapshot.revisions_of(session)
    return all(map(migrate.is_known, revisions)) and (bool(revisions) or names == {"alembic_version"})


def _put(vault: Vault, store: ObjectStore, saved: SavedObject) -> tuple[str, bool]:
    """The ETag of an object that is in the bucket now, and whether it wasn't before."""
    info = store.head(saved.key)
    if info is not None and (info.etag, info.size_bytes) == (saved.etag, saved.size_bytes):
        return info.etag, False
    done = put_pieces(store, saved.key, vault.read(saved))
    if done.sha256 != saved.sha256:
        raise BackupError(f"The backup changed while it was read ({saved.key}): run the restore again.")
    return done.etag, True


def _in_threads(do: Callable[[SavedObject], T], objects: Iterable[SavedObject]) -> Iterator[T]:
    """What it does to each, in their order; a bounded number is on its way at a time."""
    left = iter(objects)
    with ThreadPoolExecutor(_THREADS, "restore") as pool:
        while some := list(islice(left, _WINDOW)):
            yield from pool.map(do, some)
