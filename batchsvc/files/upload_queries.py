"""SQL of uploads: files that come in parts."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import case, delete, func, select
from sqlalchemy.orm import Session

from batchsvc.files.tables import Upload, UploadPart

PENDING = "pending"


def upload(session: Session, project_id: str, upload_id: str, *, is_locked: bool = False) -> Upload | None:
    """One upload of a project; locked, it changes for nobody else till the transaction ends."""
    found = select(Upload).where(Upload.id == upload_id, Upload.project_id == project_id)
    if is_locked:
        found = found.with_for_update()
    return session.scalars(found.execution_options(populate_existing=True)).first()


def parts(session: Session, upload_id: str) -> list[UploadPart]:
    """The parts of an upload that have come in."""
    return list(session.scalars(select(UploadPart).where(UploadPart.upload_id == upload_id)))


def part(session: Session, part_id: str) -> UploadPart | None:
    """One part."""
    return session.get(UploadPart, part_id)


def sizes(session: Session, upload_id: str) -> tuple[int, int]:
    """How many parts an upload has, and how many bytes they are."""
    counted = select(func.count(), func.coalesce(func.sum(UploadPart.size_bytes), 0))
    num, size_bytes = session.execute(counted.where(UploadPart.upload_id == upload_id)).one()
    return num, int(size_bytes)


def pending_bytes(session: Session, project_id: str, now_ms: int, upload_id: str | None = None) -> int:
    """Bytes that pending uploads of a project, or one of them, announce, or have brought if that is more."""
    has = select(func.coalesce(func.sum(UploadPart.size_bytes), 0)).where(UploadPart.upload_id == Upload.id)
    brought = has.correlate(Upload).scalar_subquery()
    is_pending = (Upload.project_id == project_id, Upload.status == PENDING, Upload.expires_ms > now_ms)
    counted = select(func.sum(case((brought > Upload.size_bytes, brought), else_=Upload.size_bytes))).where(*is_pending)
    return int(session.scalar(counted if upload_id is None else counted.where(Upload.id == upload_id)) or 0)


def delete_parts(session: Session, upload_id: str) -> None:
    """Forget the parts of an upload that has ended."""
    session.execute(delete(UploadPart).where(UploadPart.upload_id == upload_id))


def overdue(session: Session, now_ms: int, limit: int) -> list[Upload]:
    """Pending uploads whose time is over, for the reaper alone to take. Served by ix_uploads_pending."""
    over = select(Upload).where(Upload.status == PENDING, Upload.expires_ms <= now_ms).order_by(Upload.expires_ms)
    return list(session.scalars(over.limit(limit).with_for_update(skip_locked=True)))


def known_keys(session: Session, s3_keys: Collection[str]) -> set[str]:
    """Those of these objects that are parts of a pending upload."""
    return set(session.scalars(select(UploadPart.s3_key).where(UploadPart.s3_key.in_(s3_keys))))
