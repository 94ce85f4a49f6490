"""Puts objects that the store has lost back into the bucket from a backup, while everything works: only these, and
only where the database still names them."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import at_command_line
from batchsvc.audit.service import record
from batchsvc.backup.manifest import BackupError, Manifest, SavedObject
from batchsvc.backup.vault import Vault
from batchsvc.batches import garbage_queries, snapshot_queries
from batchsvc.db.session import Database
from batchsvc.store import keys
from batchsvc.store.pieces import put_pieces
from batchsvc.store.s3 import Bucket

_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBack:
    """What came of it. `num_lost` objects were gone, of which the backup or an older one had `num_put` whole;
    `first_left` is the key of one that none has;
    `num_corrected` were there under another ETag than noted."""

    num_lost: int
    num_put: int
    num_corrected: int
    first_left: str | None


def put_back(vault: Vault, manifest: Manifest, database_url: str, store: Bucket) -> PutBack:
    """From this backup, else from an older one. Raises UnavailableError when database or store don't answer."""
    db = Database(database_url)
    num_put = num_corrected = 0

    def told(session: Session) -> None:
        details: dict[str, str | int] = {"made_by": manifest.made_by, "made_ms": manifest.created_ms}
        details["lost_objects"] = num_put
        record(session, at_command_line(), Action.BACKUP_RESTORED, manifest.name, details=details)

    try:
        lost = _named(db)
        for prefix in (keys.INPUTS, keys.UPLOADS, keys.BATCHES):
            lost.difference_update(key for key, _ in store.list_keys(prefix))
        lost &= _named(db)  # others were let go meanwhile
        num_corrected = _correct(vault, manifest, db, store)
        found = vault.find(lost, until=manifest.name)
        try:
            for saved in found.values():
                _note(db, saved.key, _put(vault, store, saved))
                num_put += 1
        finally:
            if num_put:
                db.run(told)
    finally:
        db.dispose()
    left = sorted(lost - found.keys())
    return PutBack(
        num_lost=len(lost), num_put=num_put, num_corrected=num_corrected, first_left=left[0] if left else None
    )


def _named(db: Database) -> set[str]:
    with db.reading() as session:
        return set(snapshot_queries.named_keys(session))


def _correct(vault: Vault, manifest: Manifest, db: Database, store: Bucket) -> int:
    """Note the ETags of objects that an interrupted run has put back: these are there, under another ETag than noted,
    and have the bytes of the backup."""
    with db.reading() as session:
        noted = snapshot_queries.noted_etags(session)
    other: dict[str, str] = {}
    with ThreadPoolExecutor(_THREADS, "lost") as pool:
        for key, info in zip(noted, pool.map(store.head, noted), strict=True):
            if info is not None and info.etag != noted[key]:
                other[key] = info.etag
    num = 0
    for key, saved in vault.find(other.keys(), until=manifest.name).items():
        digest = hashlib.sha256()
        for piece in store.stream(key, etag=other[key]):
            digest.update(piece)
        if digest.hexdigest() == saved.sha256:
            _note(db, key, other[key])
            num += 1
    return num


def _note(db: Database, key: str, etag: str) -> None:
    """In one transaction with a second look: what was let go while it was put must not stay in the bucket."""

    def note(session: Session) -> None:
        if garbage_queries.referred_to(session, [key]):
            snapshot_queries.name_etags(session, {key: etag})
        else:
            garbage_queries.discard(session, [key])

    db.run(note)


def _put(vault: Vault, store: Bucket, saved: SavedObject) -> str:
    done = put_pieces(store, saved.key, vault.read(saved))
    if done.sha256 != saved.sha256:
        store.delete([saved.key])  # else the next run would take it for whole
        raise BackupError(f"The backup changed while it was read ({saved.key}): use another copy of {vault.root}.")
    return done.etag
