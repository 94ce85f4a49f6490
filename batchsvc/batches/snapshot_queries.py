"""SQL of a copy of the service: every object of the bucket that the database names, and what a restored database needs.

The names are those that garbage_queries says are referred to, the other way round: there a key is given and its rows
are sought, here the rows are walked. Not among them is what the next owner makes anew: the results of a finalizer
that isn't done, and the decoded form of an upload.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy import ColumnElement, Select, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from batchsvc.accounts.tables import Project
from batchsvc.batches import hold_queries
from batchsvc.batches.lifecycle import TERMINAL
from batchsvc.batches.quote_queries import QUEUED
from batchsvc.batches.tables import (
    Batch,
    ClaimHold,
    CollectionLock,
    Export,
    Part,
    PrefillEngine,
    Quote,
    Unit,
    Window,
    Worker,
)
from batchsvc.billing.tables import CallHold
from batchsvc.files.tables import File, UploadPart

_ROWS = 1_000  # that are fetched at once


def named_keys(session: Session) -> Iterator[str]:
    """Keys of all objects that must be in the bucket beside this database."""
    is_here = or_(File.source_uri.is_(None), File.etag != "")  # else it is still in its tenant's store
    yield from _keys(session, select(File.s3_key).where(File.deleted_ms.is_(None), is_here))
    yield from _keys(session, select(UploadPart.s3_key))
    running = select(Batch.id).where(Batch.status.not_in(TERMINAL))
    for batch_id, key in ((Unit.batch_id, Unit.s3_key), (Window.batch_id, Window.line_nos_key)):
        yield from _keys(session, select(key).where(batch_id.in_(running)))
    counts = Part.is_void.is_(False)
    yield from _keys(session, select(Part.s3_key).where(counts, or_(Part.batch_id.in_(running), _has_results())))
    for windows in session.scalars(select(Quote.windows).where(Quote.status == QUEUED)):
        yield from (window["key"] for window in windows if window.get("key"))


def passing_keys(session: Session) -> Iterator[str]:
    """Keys of unfinished sequences. Their owners replace them every few seconds, and a unit that doesn't find its own
    begins its lines anew: they are worth having and needn't be there."""
    running = select(Batch.id).where(Batch.status.not_in(TERMINAL))
    return _keys(session, select(Unit.resume_key).where(Unit.batch_id.in_(running)))


def has_projects(session: Session) -> bool:
    """Whether anybody works here: all that there is belongs to a project."""
    return session.scalar(select(exists(select(Project.id)))) or False


def settle(session: Session, *, etags: Mapping[str, str], gone: Sequence[str], later_ms: int) -> int:
    """Make a copy of a database a database of its own: nobody works on anything, and nobody's engine has crashed.

    `etags`: what the bucket calls the objects now that it calls otherwise than before. `gone` are passing objects that
    it doesn't have. `later_ms` is added to the deadlines of batches that haven't ended, whose number is returned.
    """
    leased = update(Unit).where(Unit.state == "leased")
    session.execute(leased.values(state="ready", owner=None, lease_ms=0, ticket_ms=0))
    unended = Batch.status.not_in(TERMINAL)
    session.execute(update(Batch).where(unended).values(plan_lease_ms=0, fin_lease_ms=0))
    session.execute(update(Quote).where(Quote.status == QUEUED).values(plan_lease_ms=0))
    session.execute(update(Export).values(lease_ms=0))
    drained = [hold_queries.WORKER + worker for worker in session.scalars(select(Worker.id))]  # those of names stay
    for passed in (Worker, PrefillEngine, CallHold):
        session.execute(delete(passed))
    session.execute(delete(ClaimHold).where(ClaimHold.target.in_(drained)))
    session.execute(delete(CollectionLock).where(CollectionLock.holder != ""))
    name_etags(session, etags)
    for first in range(0, len(gone), _ROWS):
        nameless = update(Unit).where(Unit.resume_key.in_(gone[first : first + _ROWS]))
        session.execute(nameless.values(resume_key=None, resume_sha256=None))
    if later_ms:
        later = {
            "expires_ms": Batch.expires_ms + later_ms,
            "latest_start_ms": Batch.latest_start_ms + later_ms,
        }
        session.execute(update(Batch).where(unended).values(later))
    return session.scalar(select(func.count()).select_from(Batch).where(unended)) or 0


def name_etags(session: Session, etags: Mapping[str, str]) -> None:
    """Note what the bucket calls objects that it calls otherwise than before."""
    for key, etag in etags.items():
        session.execute(update(File).where(File.s3_key == key, File.etag != "").values(etag=etag))
        session.execute(update(UploadPart).where(UploadPart.s3_key == key).values(etag=etag))


def noted_etags(session: Session) -> dict[str, str]:
    """What the database says that the bucket calls its objects, by their keys."""
    files = select(File.s3_key, File.etag).where(File.deleted_ms.is_(None), File.etag != "")
    parts = select(UploadPart.s3_key, UploadPart.etag)
    return {row.s3_key: row.etag for wanted in (files, parts) for row in session.execute(wanted)}


def _keys(session: Session, wanted: Select[str] | Select[str | None]) -> Iterator[str]:
    rows = session.execute(wanted.execution_options(yield_per=_ROWS))
    return (key for (key,) in rows if key)


def _has_results() -> ColumnElement[bool]:
    """Whether a part is of an ended batch whose results are all still there, for whoever follows them."""
    there = [
        or_(file_id.is_(None), exists(select(File.id).where(File.id == file_id, File.deleted_ms.is_(None))))
        for file_id in (Batch.output_file_id, Batch.error_file_id)
    ]
    has_any = or_(Batch.output_file_id.is_not(None), Batch.error_file_id.is_not(None))
    return Part.batch_id.in_(select(Batch.id).where(Batch.status.in_(TERMINAL), has_any, *there))
