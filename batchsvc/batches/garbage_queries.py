"""SQL of garbage: which objects somebody refers to, and which are marked to be deleted.

An object is *referred to* by a file that nobody has deleted, by an upload that waits for its other parts, or, while its
batch runs, by a row of it: a unit (its file, its unfinished sequences), a part that counts, a window; and by the
finalizer whose epoch is the batch's. Of an ended batch the parts stay as long as its files do, for readers who follow
its results in order of completion; its other objects have served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.tables import Batch, Garbage, Part, Unit, Window
from batchsvc.db.session import database_now_ms
from batchsvc.files import service as files
from batchsvc.files import upload_service as uploads
from batchsvc.store import keys

DOWNLOAD_S = 600  # a download that has begun may end
_COLUMNS = (
    (Unit.batch_id, Unit.s3_key),
    (Unit.batch_id, Unit.resume_key),
    (Part.batch_id, Part.s3_key),
    (Window.batch_id, Window.line_nos_key),
)


def discard(session: Session, s3_keys: Iterable[str], *, grace_s: float = 0) -> None:
    """Have objects deleted after `grace_s`, unless somebody refers to them by then."""
    not_before = database_now_ms(session) + round(grace_s * 1000)
    for key in s3_keys:
        session.merge(Garbage(s3_key=key, not_before_ms=not_before))


def due(session: Session, limit: int) -> list[str]:
    """Objects to delete now."""
    ripe = select(Garbage.s3_key).where(Garbage.not_before_ms <= database_now_ms(session))
    return list(session.scalars(ripe.order_by(Garbage.not_before_ms).limit(limit)))


def forget(session: Session, s3_keys: Sequence[str]) -> None:
    """Note that objects are deleted, or needed after all."""
    session.execute(delete(Garbage).where(Garbage.s3_key.in_(s3_keys)))


def referred_to(session: Session, s3_keys: Collection[str]) -> set[str]:
    """Those of these objects that somebody refers to."""
    found = files.known_keys(session, s3_keys) | uploads.known_keys(session, s3_keys)
    batch_ids = {batch_id for key in s3_keys if (batch_id := keys.batch_of(key))}
    unended = select(Batch.id, Batch.fin_epoch).where(Batch.id.in_(batch_ids), Batch.status.not_in(TERMINAL))
    running = {row.id: row.fin_epoch for row in session.execute(unended)}
    for batch_column, key_column in _COLUMNS:
        named = select(key_column).where(batch_column.in_(running), key_column.in_(s3_keys))
        if key_column.class_ is Part:
            named = named.where(Part.is_void.is_(False))
        found.update(key for key in session.scalars(named) if key)
    for batch_id, fin_epoch in running.items():
        found.update(keys.output(batch_id, fin_epoch, kind) for kind in keys.OUTPUT_KINDS)
    found |= _readable_parts(session, batch_ids, s3_keys)
    return found & set(s3_keys)


def _readable_parts(session: Session, batch_ids: Collection[str], s3_keys: Collection[str]) -> set[str]:
    """Those of these objects that are parts of an ended batch whose results nobody has deleted."""
    names = (Batch.id, Batch.fin_epoch, Batch.output_file_id, Batch.error_file_id)
    ended = session.execute(select(*names).where(Batch.id.in_(batch_ids), Batch.status.in_(TERMINAL))).all()
    results = {
        batch.id: {
            keys.output(batch.id, batch.fin_epoch, kind)
            for kind, file_id in zip(keys.OUTPUT_KINDS, (batch.output_file_id, batch.error_file_id), strict=True)
            if file_id is not None
        }
        for batch in ended
    }
    known = files.known_keys(session, set().union(*results.values()))
    readable = [batch_id for batch_id, of_batch in results.items() if of_batch and of_batch <= known]
    parts = select(Part.s3_key).where(Part.batch_id.in_(readable), Part.s3_key.in_(s3_keys), Part.is_void.is_(False))
    return set(session.scalars(parts))


def finalizing(session: Session, s3_keys: Collection[str]) -> set[str]:
    """Those of these objects that a finalizer is just uploading."""
    batch_ids = {batch_id for key in s3_keys if (batch_id := keys.batch_of(key))}
    live = select(Batch.id, Batch.fin_epoch).where(
        Batch.id.in_(batch_ids), Batch.status == Status.FINALIZING, Batch.fin_lease_ms > database_now_ms(session)
    )
    return {keys.output(row.id, row.fin_epoch, kind) for row in session.execute(live) for kind in keys.OUTPUT_KINDS}
