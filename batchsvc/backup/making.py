"""Makes a backup while the service works: the database first, then every object that it names.

1. Hold the collection of garbage (a lease, so that it ends if this process is killed); wait for deletions that go on.
2. Copy the database as it is at one moment.
3. Copy the objects that this copy names; what is in the vault already, as an earlier backup noted, isn't read again.
4. Write the manifest. From then on there is a backup.

An object that is gone when its turn comes may have been let go since the moment of 2, by a process that knows no hold:
then all is done once more. One that the database still names is lost, and the backup says so; where an earlier backup
in the vault has it, this one has it too. Unfinished sequences are no such objects: their owners replace them all the
time, and whoever misses them begins anew.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path

from batchsvc.backup.manifest import BackupError, Manifest, SavedObject
from batchsvc.backup.vault import OBJECTS, SCRATCH, Vault
from batchsvc.batches import collection_queries, garbage_queries, snapshot_queries
from batchsvc.clock import monotonic_s, now_ms
from batchsvc.db.session import Database
from batchsvc.db.snapshot import snapshot_of
from batchsvc.errors import NotFoundError
from batchsvc.store.s3 import Bucket
from batchsvc.tables import metadata

HOLD_S = 900.0  # beyond its last prolongation
_PROLONG_S = 60.0
_COLLECTING_S = collection_queries.SWEEP_S + 30
_ATTEMPTS = 3
_THREADS, _WINDOW = 8, 256
_ASKED = 500  # keys in one statement: databases take some ten thousand parameters
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of it. `num_copied` and `bytes_copied`: what wasn't there before; `first_missing` of `num_missing`;
    `num_held` objects were lost by the store, too, but an earlier backup had them, the first being `first_held`."""

    manifest: Manifest
    num_copied: int
    bytes_copied: int
    first_missing: str | None
    num_held: int
    first_held: str | None


class Hold:
    """Keeps objects from being deleted for as long as it is open, and `HOLD_S` at most once nobody prolongs it."""

    def __init__(self, db: Database, holder: str) -> None:
        self._db, self._holder = db, holder
        self._next_s = 0.0

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """Raises BackupError if deletions don't end."""
        self.prolong()
        try:
            deadline = monotonic_s() + _COLLECTING_S
            while self._db.run(collection_queries.is_collecting):
                if monotonic_s() > deadline:
                    raise BackupError("The collection of garbage doesn't pause: look at the log of the control worker.")
                time.sleep(_LOOK_S)
            yield self
        finally:
            self._db.run(lambda session: collection_queries.release_collection(session, self._holder))

    def prolong(self) -> None:
        """Move the end, now and then: to be called often."""
        if monotonic_s() < self._next_s:
            return
        self._next_s = monotonic_s() + _PROLONG_S
        self._db.run(
            lambda session: collection_queries.hold_collection(session, self._holder, reason="a backup", hold_s=HOLD_S)
        )


def make_backup(
    vault: Vault,
    database_url: str,
    store: Bucket,
    *,
    is_live: bool,
    secrets: dict[str, str] | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> Made:
    """Copy a service into the vault. `is_live`: others may work with its database and its bucket at the same time.

    Raises BackupError, or UnavailableError for a database or a store that doesn't answer.
    """
    name = _new_name(vault)
    db = Database(database_url)
    try:
        hold: AbstractContextManager[Hold | None] = Hold(db, f"backup:{name}").held() if is_live else nullcontext()
        with hold as holding:
            known = _known_objects(vault)
            for attempt in range(1, _ATTEMPTS + 1):
                made = _Attempt(vault, name, store, holding, known, say).run(database_url, secrets)
                if not made.missing:
                    break
                lost = _still_named(db, made.missing)
                if len(lost) == len(made.missing) or attempt == _ATTEMPTS:
                    break
                say("Objects went while they were being copied: once more.")
        named = _still_named(db, made.held) if made.held else set()  # the others were let go meanwhile
        held = [key for key in made.held if key in named]
        vault.finish(made.manifest)
    finally:
        db.dispose()
    return Made(
        manifest=made.manifest,
        num_copied=made.num_copied,
        bytes_copied=made.bytes_copied,
        first_missing=made.missing[0] if made.missing else None,
        num_held=len(held),
        first_held=held[0] if held else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    manifest: Manifest
    num_copied: int
    bytes_copied: int
    missing: list[str]
    held: list[str]  # gone from the store, but in the vault


class _Attempt:
    """One moment of the database, and its objects."""

    def __init__(
        self,
        vault: Vault,
        name: str,
        store: Bucket,
        hold: Hold | None,
        known: dict[str, SavedObject],
        say: Callable[[str], None],
    ) -> None:
        self._vault, self._name, self._store, self._hold, self._say = vault, name, store, hold, say
        self._known = known  # by key; what this attempt saves, the next one knows
        self._held: list[str] = []

    def run(self, database_url: str, secrets: dict[str, str] | None) -> _Copied:
        vault, name = self._vault, self._name
        vault.begin(name)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=vault.root) as scratch, vault.explained():
            self._say("Copying the database.")
            with snapshot_of(database_url, Path(scratch), metadata.tables.keys()) as snapshot:
                files = []
                for file in snapshot.files:
                    stored = vault.write(name, file.name, self._prolonging(file.pieces()))
                    files.append(stored.of_table(file.table, file.columns))
                needed = set(snapshot_queries.named_keys(snapshot.session))
                keys = sorted(needed.union(snapshot_queries.passing_keys(snapshot.session)))
                revision, created_ms = snapshot.revision, snapshot.now_ms
        self._say(f"Copying what is new among {len(keys):,} objects.")
        saved = [one for one in self._copy(keys) if one[0].sha256 or one[0].key in needed]
        older = vault.find({one.key for one, _ in saved if not one.sha256})
        self._held += older
        saved = [(older.get(one.key, one), is_fresh) for one, is_fresh in saved]
        objects = vault.write(name, OBJECTS, (one.line() for one, _ in saved))
        if secrets:
            vault.write_secrets(name, secrets)
        there = [one for one, _ in saved if one.sha256]
        self._known.update((one.key, one) for one in there)
        fresh = [one for one, is_fresh in saved if is_fresh]
        manifest = Manifest(
            name=name,
            made_by=f"batchsvc {version('batchsvc')}",
            created_ms=created_ms,
            revision=revision,
            kind=snapshot.kind,
            database=tuple(files),
            objects=objects,
            num_objects=len(there),
            num_bytes=sum(one.size_bytes for one in there),
            num_missing=len(saved) - len(there),
            has_secrets=bool(secrets),
        )
        return _Copied(
            manifest=manifest,
            num_copied=len(fresh),
            bytes_copied=sum(one.size_bytes for one in fresh),
            missing=[one.key for one, _ in saved if not one.sha256],
            held=sorted(key for key in self._held if key in needed),
        )

    def _copy(self, keys: list[str]) -> list[tuple[SavedObject, bool]]:
        """The objects of these keys, each with whether it had to be read."""
        saved: list[tuple[SavedObject, bool]] = []
        left = iter(keys)
        with ThreadPoolExecutor(_THREADS, "backup") as pool:
            while some := list(islice(left, _WINDOW)):
                running: set[Future[tuple[SavedObject, bool]]] = {pool.submit(self._save, key) for key in some}
                while running:
                    done, running = wait(running, timeout=_LOOK_S)
                    saved += [one.result() for one in done]
                    self._prolong()
        return sorted(saved, key=lambda one: one[0].key)

    def _save(self, key: str) -> tuple[SavedObject, bool]:
        info, known = self._store.head(key), self._known.get(key)
        if info is not None:
            if known and (known.etag, known.size_bytes) == (info.etag, info.size_bytes) and self._vault.has(known):
                return known, False
            try:
                sha256, size = self._vault.add(self._store.stream(key, end=info.size_bytes, etag=info.etag))
            except NotFoundError:
                pass
            else:
                if size != info.size_bytes:
                    raise BackupError(f"The object store gave {size} of {info.size_bytes} bytes of {key}: try again.")
                return SavedObject(key=key, size_bytes=size, sha256=sha256, etag=info.etag), True
        if known and self._vault.has(known) and self._vault.is_sound(known):
            self._held.append(key)
            return known, False
        return SavedObject(key=key, size_bytes=0, sha256="", etag=""), False

    def _prolonging(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._prolong()
            yield piece

    def _prolong(self) -> None:
        if self._hold is not None:
            self._hold.prolong()


def _known_objects(vault: Vault) -> dict[str, SavedObject]:
    """What the newest backup says of the bucket: a key names one version of an object, mostly."""
    done = vault.finished()
    if not done:
        return {}
    try:
        return {saved.key: saved for saved in vault.objects(vault.manifest(done[-1])) if saved.sha256}
    except (BackupError, OSError):
        return {}  # then all is copied anew


def _still_named(db: Database, keys: list[str]) -> set[str]:
    with db.reading() as session:
        pieces = (keys[first : first + _ASKED] for first in range(0, len(keys), _ASKED))
        return set().union(*(garbage_queries.referred_to(session, piece) for piece in pieces))


def _new_name(vault: Vault) -> str:
    """The time (UTC), so that names are in the order of their making."""
    name = datetime.fromtimestamp(now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    if name <= max(vault.finished(), default=""):
        raise BackupError(f"The newest backup in {vault.root} is from the future: set this machine's clock right.")
    return name
