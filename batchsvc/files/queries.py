"""SQL of files. A file that is deleted or past its life is gone for every reader, at once."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Select, func, or_, select, update
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import ColumnElement

from batchsvc.db.keyset import Cursor, page
from batchsvc.files import purge_queries
from batchsvc.files.retention import Kind
from batchsvc.files.tables import File

_REASON_CHARS = 2_048


def file(session: Session, project_id: str, file_id: str, now_ms: int) -> File | None:
    """One file of a project that is still there."""
    return session.scalars(_one(project_id, file_id).where(_is_there(now_ms))).first()


def locked_file(session: Session, project_id: str, file_id: str, now_ms: int) -> File | None:
    """The same, locked till the transaction ends: who deletes it or makes a batch of it does so alone."""
    found = _one(project_id, file_id).where(_is_there(now_ms)).with_for_update()
    return session.scalars(found.execution_options(populate_existing=True)).first()


def stored_file(session: Session, project_id: str, file_id: str) -> File | None:
    """One file of a project that nobody has deleted, even if its life is over."""
    return session.scalars(_one(project_id, file_id).where(File.deleted_ms.is_(None))).first()


def upload_like(
    session: Session, project_id: str, filename: str, sha256: str, life_ms: int, since_ms: int, now_ms: int
) -> File | None:
    """The newest upload since then of the same bytes under the same name and for the same time that is still there."""
    wanted = select(File).where(
        File.project_id == project_id,
        File.created_ms >= since_ms,
        File.filename == filename,
        File.sha256 == sha256,
        File.expires_ms == File.created_ms + life_ms,
        _is_there(now_ms),
    )
    return session.scalars(wanted.order_by(File.created_ms.desc(), File.id.desc()).limit(1)).first()


def imported(session: Session, project_id: str, source_uri: str, source_etag: str, now_ms: int) -> File | None:
    """The newest file of this version of this object that is still there. Served by ix_files_source."""
    wanted = select(File).where(
        File.project_id == project_id, File.source_uri == source_uri, File.source_etag == source_etag, _is_there(now_ms)
    )
    return session.scalars(wanted.order_by(File.created_ms.desc(), File.id.desc()).limit(1)).first()


def note_copied(session: Session, file_id: str, etag: str, sha256: str) -> None:
    """Name the copy of an imported file."""
    session.execute(update(File).where(File.id == file_id).values(etag=etag, sha256=sha256))


def note_failure(session: Session, file_id: str) -> int:
    """Count a failed attempt to copy a file. Returns how many there were."""
    counted = update(File).where(File.id == file_id).values(num_failures=File.num_failures + 1)
    return session.scalar(counted.returning(File.num_failures)) or 0


def note_import_error(session: Session, file_id: str, reason: str) -> None:
    """Say why a file isn't copied."""
    session.execute(update(File).where(File.id == file_id).values(source_error=reason[:_REASON_CHARS]))


def cursor(session: Session, project_id: str, file_id: str) -> Cursor | None:
    """Where a file stands in the listing; a deleted one keeps its place, so that a walk over pages goes on."""
    row = session.scalars(_one(project_id, file_id)).first()
    return Cursor(row.created_ms, row.id) if row else None


def files(
    session: Session,
    project_id: str,
    *,
    after: Cursor | None,
    limit: int,
    ascending: bool,
    purpose: str | None,
    now_ms: int,
) -> list[File]:
    """At most `limit` files of a project beyond `after`. Served by ix_files_listing."""
    wanted = select(File).where(File.project_id == project_id, _is_there(now_ms))
    if purpose is not None:
        wanted = wanted.where(File.purpose == purpose)
    return list(session.scalars(page(wanted, File.created_ms, File.id, after, limit, ascending)))


def mark_deleted(session: Session, file_id: str, now_ms: int) -> None:
    """Delete a file that is locked, and have its content wiped."""
    session.execute(update(File).where(File.id == file_id).values(deleted_ms=now_ms))
    purge_queries.add(session, Kind.FILE, file_id, now_ms)


def ever(session: Session, project_id: str, file_id: str) -> File | None:
    """One file of a project, whether or not it is there."""
    return session.scalars(_one(project_id, file_id).execution_options(populate_existing=True)).first()


def gone_among(session: Session, file_ids: Collection[str], now_ms: int) -> list[File]:
    """Those of these files that were deleted or are past their life."""
    return list(session.scalars(select(File).where(File.id.in_(file_ids), ~_is_there(now_ms))))


def expiries(session: Session, file_ids: Collection[str]) -> dict[str, int]:
    """When these files are out of sight, or have been since: by their id."""
    ends = func.coalesce(File.deleted_ms, File.expires_ms)
    rows = session.execute(select(File.id, ends).where(File.id.in_(file_ids), ends.is_not(None)))
    return {row[0]: int(row[1]) for row in rows}


def expired(session: Session, now_ms: int, limit: int, is_read: ColumnElement[bool]) -> list[File]:
    """Files whose life is over, that nobody has deleted and nobody reads, for the reaper alone to take. Served by
    ix_files_expiry."""
    over = select(File).where(File.deleted_ms.is_(None), File.expires_ms <= now_ms, ~is_read)
    return list(session.scalars(over.order_by(File.expires_ms).limit(limit).with_for_update(skip_locked=True, of=File)))


def known_keys(session: Session, s3_keys: Collection[str]) -> set[str]:
    """Those of these objects that belong to a file that nobody has deleted."""
    return set(session.scalars(select(File.s3_key).where(File.s3_key.in_(s3_keys), File.deleted_ms.is_(None))))


def _one(project_id: str, file_id: str) -> Select[File]:
    return select(File).where(File.id == file_id, File.project_id == project_id)


def _is_there(now_ms: int) -> ColumnElement[bool]:
    return File.deleted_ms.is_(None) & or_(File.expires_ms.is_(None), File.expires_ms > now_ms)


def stored_bytes(session: Session, project_id: str, api_key_id: str | None, now_ms: int) -> int:
    """Bytes of the files that a project keeps, or of those that one of its keys brought."""
    is_kept = (File.deleted_ms.is_(None), or_(File.expires_ms.is_(None), File.expires_ms > now_ms))
    found = select(func.sum(File.size_bytes)).where(File.project_id == project_id, *is_kept)
    return int(session.scalar(found if api_key_id is None else found.where(File.api_key_id == api_key_id)) or 0)
