"""Puts objects that the store has lost back into the bucket from a backup, while everything works: only these, and
only where the database still names them."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchsvc.audit.actions import Action
from batchsvc.audit.actor import at_command_line
from batchsvc.audit.service import record
from batchsvc.backup.manifest import Manifest, SavedObject
from batchsvc.backup.vault import Vault
from batchsvc.batches import snapshot_queries
from batchsvc.db.session import Database
from batchsvc.store import keys
from batchsvc.store.pieces import put_pieces
from batchsvc.store.s3 import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBack:
    """What came of it. `num_lost` objects were gone, of which the backup or an older one had `num_put` whole;
    `first_left` is the key of one that none has."""

    num_lost: int
    num_put: int
    first_left: str | None


def put_back(vault: Vault, manifest: Manifest, database_url: str, store: Bucket) -> PutBack:
    """From this backup, else from an older one. Raises UnavailableError when database or store don't answer."""
    db = Database(database_url)
    try:
        lost = _named(db)
        for prefix in (keys.INPUTS, keys.UPLOADS, keys.BATCHES):
            lost.difference_update(key for key, _ in store.list_keys(prefix))
        lost &= _named(db)  # others were let go meanwhile
        found = vault.find(lost, until=manifest.name)
        etags = {key: _put(vault, store, one) for key, one in found.items()}

        def note(session: Session) -> None:
            snapshot_queries.name_etags(session, etags)
            told: dict[str, str | int] = {"made_by": manifest.made_by, "made_ms": manifest.created_ms}
            told["lost_objects"] = len(found)
            record(session, at_command_line(), Action.BACKUP_RESTORED, manifest.name, details=told)

        if found:
            db.run(note)
    finally:
        db.dispose()
    left = sorted(lost - etags.keys())
    return PutBack(num_lost=len(lost), num_put=len(found), first_left=left[0] if left else None)


def _named(db: Database) -> set[str]:
    with db.reading() as session:
        return set(snapshot_queries.named_keys(session))


def _put(vault: Vault, store: Bucket, saved: SavedObject) -> str:
    return put_pieces(store, saved.key, vault.read(saved)).etag
