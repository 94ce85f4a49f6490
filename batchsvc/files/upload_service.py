"""What can be done with uploads, apart from moving their bytes: create, take parts, complete, cancel, expire.

    pending -> completed | cancelled | expired

Parts come in any order and several at once; which of them the file consists of, and in which order, says the call that
completes it. A part that was sent twice, because its answer got lost, has two ids and is used once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.files import purge_queries
from batchsvc.files import service as files
from batchsvc.files import upload_queries as queries
from batchsvc.files.retention import Kind
from batchsvc.files.tables import Upload, UploadPart
from batchsvc.files.upload_queries import PENDING
from batchsvc.files.upload_schemas import CompleteUpload, CreateUpload
from batchsvc.http.uploads import Stored

COMPLETED, CANCELLED, EXPIRED = "completed", "cancelled", "expired"
MAX_PART_BYTES = 64 * 1024 * 1024
_MAX_PARTS = 10_000
_EXPIRE_AT_ONCE = 20
_MD5 = re.compile(r"[0-9a-fA-F]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What an upload becomes: the bytes of these parts one after the other."""

    upload: Upload
    parts: Sequence[UploadPart]
    md5: str | None


def create(
    session: Session, project_id: str, body: CreateUpload, *, upload_id: str, ttl_s: int, life_s: int, max_bytes: int
) -> Upload:
    """A new upload, to be completed within `ttl_s`; its file then lives for `life_s`."""
    files.check_purpose(body.purpose)
    filename = files.clean_filename(body.filename)
    files.check_filename(filename, param="filename")
    if body.bytes > max_bytes:
        raise InvalidRequestError(
            f"bytes: a file has at most {max_bytes} bytes here, not {body.bytes}: split it.",
            code="file_too_large",
            param="bytes",
        )
    if (made := queries.upload(session, project_id, upload_id)) is not None:
        return made  # the answer to the commit was lost
    now = database_now_ms(session)
    row = Upload(
        id=upload_id,
        project_id=project_id,
        purpose=body.purpose,
        filename=filename,
        size_bytes=body.bytes,
        file_life_s=life_s,
        status=PENDING,
        created_ms=now,
        expires_ms=now + ttl_s * 1000,
    )
    session.add(row)
    session.flush()
    return row


def status_of(session: Session, row: Upload) -> str:
    """The status to show: an upload whose time is over has expired, whether or not the reaper has come by."""
    return EXPIRED if row.status == PENDING and row.expires_ms <= database_now_ms(session) else row.status


def is_fresh(session: Session, project_id: str, upload_id: str) -> bool:
    """Whether an upload is pending and nothing has come into it yet."""
    row = queries.upload(session, project_id, upload_id)
    return row is not None and status_of(session, row) == PENDING and queries.sizes(session, row.id)[0] == 0


def get_pending(session: Session, project_id: str, upload_id: str, *, is_locked: bool = False) -> Upload:
    """An upload that takes parts. Raises NotFoundError, or InvalidRequestError for one that has ended."""
    row = _get(session, project_id, upload_id, is_locked=is_locked)
    status = status_of(session, row)
    if status != PENDING:
        raise InvalidRequestError(
            f"Upload {row.id} is {status}: create a new one.", code="upload_not_pending", param="upload_id"
        )
    return row


def add_part(
    session: Session, project_id: str, upload_id: str, *, part_id: str, s3_key: str, stored: Stored, max_bytes: int
) -> UploadPart:
    """Record a part whose bytes are stored. All parts of an upload together have at most `max_bytes`."""
    row = get_pending(session, project_id, upload_id, is_locked=True)
    if (made := queries.part(session, part_id)) is not None:
        return made  # the answer to the commit was lost
    num, size_bytes = queries.sizes(session, row.id)
    if num >= _MAX_PARTS or size_bytes + stored.size_bytes > max_bytes:
        raise InvalidRequestError(
            f"An upload takes at most {_MAX_PARTS} parts of {max_bytes} bytes together: "
            f"{row.id} has {num} of {size_bytes} bytes.",
            code="too_many_parts",
            param="data",
        )
    part = UploadPart(
        id=part_id,
        upload_id=row.id,
        s3_key=s3_key,
        etag=stored.etag,
        size_bytes=stored.size_bytes,
        created_ms=database_now_ms(session),
    )
    session.add(part)
    session.flush()
    return part


def assembly(session: Session, project_id: str, upload_id: str, body: CompleteUpload) -> Assembly | Upload:
    """What is to be put together; or the upload itself, if the same call has completed it before."""
    row = _get(session, project_id, upload_id)
    if body.part_ids is None:
        raise InvalidRequestError(
            "Missing required parameter: 'part_ids'.", code="missing_required_parameter", param="part_ids"
        )
    if row.status == COMPLETED and row.part_ids == body.part_ids:
        return row
    row = get_pending(session, project_id, upload_id)
    if body.md5 is not None and not _MD5.fullmatch(body.md5):
        raise InvalidRequestError("md5: it must be 32 hexadecimal digits.", code="invalid_value", param="md5")
    known = {part.id: part for part in queries.parts(session, row.id)}
    unknown = next((part_id for part_id in body.part_ids if part_id not in known), None)
    if unknown is not None:
        raise _wrong_parts(f"{row.id} has no part {unknown[:64]}.")
    twice = next((part_id for part_id, count in Counter(body.part_ids).items() if count > 1), None)
    if twice is not None:
        raise _wrong_parts(f"the part {twice} is named twice.")
    parts = [known[part_id] for part_id in body.part_ids]
    size_bytes = sum(part.size_bytes for part in parts)
    if size_bytes != row.size_bytes:
        raise _wrong_parts(f"these parts have {size_bytes} bytes, but {row.id} was created for {row.size_bytes}.")
    return Assembly(upload=row, parts=parts, md5=body.md5.lower() if body.md5 else None)


def complete(
    session: Session,
    whole: Assembly,
    *,
    file_id: str,
    s3_key: str,
    stored: Stored,
    discard: Callable[[Session, str], None],
) -> Upload:
    """Make the file known whose bytes were put together. Of two such calls at once one does, and both get its file."""
    part_ids = [part.id for part in whole.parts]
    row = _get(session, whole.upload.project_id, whole.upload.id, is_locked=True)
    if row.status == COMPLETED and row.part_ids == part_ids:
        return row
    get_pending(session, row.project_id, row.id)
    file = files.add_upload(
        session,
        file_id=file_id,
        project_id=row.project_id,
        filename=row.filename,
        s3_key=s3_key,
        etag=stored.etag,
        sha256=stored.sha256,
        size_bytes=stored.size_bytes,
        life_s=row.file_life_s,
    )
    row.part_ids, row.file_id = part_ids, file.id
    _end(session, row, COMPLETED, discard)
    return row


def cancel(session: Session, project_id: str, upload_id: str, *, discard: Callable[[Session, str], None]) -> Upload:
    """Give an upload up; again, it changes nothing. A completed or expired one is refused."""
    row = _get(session, project_id, upload_id, is_locked=True)
    if row.status != CANCELLED:
        get_pending(session, project_id, upload_id)
        _end(session, row, CANCELLED, discard)
    return row


def expire(session: Session, *, discard: Callable[[Session, str], None]) -> int:
    """End uploads whose time is over, a bounded number at once. Returns how many."""
    overdue = queries.overdue(session, database_now_ms(session), _EXPIRE_AT_ONCE)
    for row in overdue:
        _end(session, row, EXPIRED, discard)
    return len(overdue)


def known_keys(session: Session, s3_keys: Collection[str]) -> set[str]:
    """Those of these objects that belong to an upload that is pending."""
    return queries.known_keys(session, s3_keys)


def _end(session: Session, row: Upload, status: str, discard: Callable[[Session, str], None]) -> None:
    row.status = status
    for part in queries.parts(session, row.id):
        discard(session, part.s3_key)
    queries.delete_parts(session, row.id)
    purge_queries.add(session, Kind.UPLOAD, row.id, database_now_ms(session))
    session.flush()


def _get(session: Session, project_id: str, upload_id: str, *, is_locked: bool = False) -> Upload:
    row = queries.upload(session, project_id, upload_id, is_locked=is_locked)
    if row is None:
        raise NotFoundError(f"No such Upload object: {upload_id}", param="upload_id")
    return row


def _wrong_parts(says: str) -> InvalidRequestError:
    return InvalidRequestError(f"part_ids: {says}", code="invalid_value", param="part_ids")
