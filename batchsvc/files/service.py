"""What can be done with files, apart from moving their bytes: record, find, list, delete, expire."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NoReturn

from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import ColumnElement

from batchsvc import ids
from batchsvc.accounts.idempotency import RETRY_MS
from batchsvc.db.session import database_now_ms
from batchsvc.errors import InvalidRequestError, NotFoundError
from batchsvc.files import queries
from batchsvc.files.formats import SUFFIXES
from batchsvc.files.retention import date_of
from batchsvc.files.s3_uri import S3Uri
from batchsvc.files.tables import File
from batchsvc.http.paging import PageArgs
from batchsvc.store import keys

PURPOSE = "batch"
RESULT_PURPOSE = "batch_output"
_FILENAME_BYTES = 255
_EXPIRE_AT_ONCE = 100


def add_upload(
    session: Session,
    *,
    file_id: str,
    project_id: str,
    filename: str,
    s3_key: str,
    etag: str,
    sha256: str,
    size_bytes: int,
    life_s: int,
    is_retry: bool = False,
) -> File:
    """Record an uploaded file. Recording it again under its id changes nothing.

    `is_retry`: the client says that it sends the same file again, because it got no answer; if the first one was
    recorded, that is the answer.
    """
    now = database_now_ms(session)
    made = queries.stored_file(session, project_id, file_id)
    if made is None and is_retry:
        made = queries.upload_like(session, project_id, filename, sha256, life_s * 1000, now - RETRY_MS, now)
    if made is not None:
        return made
    return _add(
        session,
        File(
            id=file_id,
            project_id=project_id,
            purpose=PURPOSE,
            filename=filename,
            s3_key=s3_key,
            etag=etag,
            sha256=sha256,
            size_bytes=size_bytes,
            created_ms=now,
            expires_ms=now + life_s * 1000,
            deleted_ms=None,
        ),
    )


def add_import(
    session: Session,
    *,
    file_id: str,
    project_id: str,
    s3_key: str,
    source: S3Uri,
    source_etag: str,
    size_bytes: int,
    life_s: int,
) -> File:
    """Record an object of a tenant's store as a file, at the version that it has now; its bytes are copied later.

    The same version of the same object is one file, as long as nobody has deleted it and its life isn't over.
    """
    now = database_now_ms(session)
    made = queries.stored_file(session, project_id, file_id) or queries.imported(
        session, project_id, str(source), source_etag, now
    )
    if made is not None:
        if not made.sha256:
            made.num_failures, made.source_error = 0, None
        return made
    return _add(
        session,
        File(
            id=file_id,
            project_id=project_id,
            purpose=PURPOSE,
            filename=clean_filename(source.name) or "input",
            s3_key=s3_key,
            etag="",
            sha256="",
            size_bytes=size_bytes,
            created_ms=now,
            expires_ms=now + life_s * 1000,
            deleted_ms=None,
            source_uri=str(source),
            source_etag=source_etag,
        ),
    )


def note_copied(session: Session, file_id: str, *, etag: str, sha256: str) -> None:
    """Note that the bytes of an imported file are here."""
    queries.note_copied(session, file_id, etag, sha256)


def note_failure(session: Session, file_id: str) -> int:
    """Note that an attempt to copy a file has failed. Returns how many have."""
    return queries.note_failure(session, file_id)


def note_import_error(session: Session, file_id: str, reason: str) -> None:
    """Note that a file will never be copied, and why."""
    queries.note_import_error(session, file_id, reason)


def add_result(
    session: Session,
    *,
    project_id: str,
    filename: str,
    s3_key: str,
    etag: str,
    sha256: str,
    size_bytes: int,
    created_ms: int,
    expires_ms: int,
) -> File:
    """Record a result file that the finalizer has written."""
    return _add(
        session,
        File(
            id=ids.file_id(),
            project_id=project_id,
            purpose=RESULT_PURPOSE,
            filename=filename,
            s3_key=s3_key,
            etag=etag,
            sha256=sha256,
            size_bytes=size_bytes,
            created_ms=created_ms,
            expires_ms=expires_ms,
            deleted_ms=None,
        ),
    )


def find_for_batch(session: Session, project_id: str, file_id: str) -> File | None:
    """A file that a new batch may read, or None; it can't be deleted, nor get another batch, until this one is made."""
    return queries.locked_file(session, project_id, file_id, database_now_ms(session))


def find_stored(session: Session, project_id: str, file_id: str) -> File | None:
    """A file that a running batch reads, or None; its life may be over, its bytes are kept for the batch."""
    return queries.stored_file(session, project_id, file_id)


def get(session: Session, project_id: str, file_id: str) -> File:
    """A file of this project that is still there. Raises NotFoundError."""
    row = queries.file(session, project_id, file_id, database_now_ms(session))
    return row or _absent(session, project_id, file_id)


def why_gone(session: Session, project_id: str, file_id: str) -> str | None:
    """What has become of a file that isn't there any more, for the end of a sentence. None: it never was."""
    row = queries.ever(session, project_id, file_id)
    return None if row is None else _what_became(row)


def whereabouts(session: Session, file_ids: Collection[str]) -> dict[str, str]:
    """What has become of those of these files that aren't there any more, by their id."""
    return {row.id: _what_became(row) for row in queries.gone_among(session, file_ids, database_now_ms(session))}


def ends_ms(session: Session, file_ids: Collection[str]) -> dict[str, int]:
    """When these files will be, or were, out of sight, by their id."""
    return queries.expiries(session, file_ids)


def list_files(session: Session, project_id: str, page: PageArgs, purpose: str | None) -> list[File]:
    """One more file than the page holds, if there is one."""
    after = None
    if page.after is not None:
        after = page.known(queries.cursor(session, project_id, page.after))
    return queries.files(
        session,
        project_id,
        after=after,
        limit=page.limit + 1,
        ascending=page.is_ascending,
        purpose=purpose,
        now_ms=database_now_ms(session),
    )


def delete(
    session: Session,
    project_id: str,
    file_id: str,
    *,
    live_batch_of: Callable[[Session, str], str | None],
    discard: Callable[[Session, str], None],
) -> File:
    """Delete a file unless a batch still reads it. `discard` has the object removed later."""
    now = database_now_ms(session)
    row = queries.locked_file(session, project_id, file_id, now) or _absent(session, project_id, file_id)
    user = live_batch_of(session, row.id)
    if user is not None:
        raise InvalidRequestError(
            f"File {row.id} is the input of {user}, which hasn't ended: wait for it or cancel it first.",
            code="file_in_use",
            param="id",
        )
    queries.mark_deleted(session, row.id, now)
    _discard(session, row, discard)
    return row


def expire(
    session: Session,
    *,
    is_read: ColumnElement[bool],
    live_batch_of: Callable[[Session, str], str | None],
    discard: Callable[[Session, str], None],
) -> int:
    """Delete files whose life is over, a bounded number at once. An input that a batch still reads stays till later.

    `is_read` says of a row of files whether a batch reads it: those don't count among the number.
    """
    now, taken = database_now_ms(session), 0
    for row in queries.expired(session, now, _EXPIRE_AT_ONCE, is_read):
        if live_batch_of(session, row.id) is None:  # nor since the rows were found
            queries.mark_deleted(session, row.id, now)
            _discard(session, row, discard)
            taken += 1
    return taken


def known_keys(session: Session, s3_keys: Collection[str]) -> set[str]:
    """Those of these objects that belong to a file that nobody has deleted: itself, or its plain form."""
    known = queries.known_keys(session, {keys.input_of(key) for key in s3_keys})
    return {key for key in s3_keys if keys.input_of(key) in known}


def clean_filename(raw: str) -> str:
    """A client's file name as we keep and show it: the last path component, printable, at most 255 bytes."""
    name = raw.replace("\\", "/").rsplit("/", 1)[-1]
    name = "".join(character for character in name if character.isprintable()).strip()
    stem, dot, suffix = name.rpartition(".")
    room = _FILENAME_BYTES - len(f"{dot}{suffix}".encode())
    if stem and room > 0:
        return _cut(stem, room) + dot + suffix
    return _cut(name, _FILENAME_BYTES).strip()


def check_filename(name: str, param: str = "file") -> None:
    """Refuse a name that no batch could read, before its bytes are stored."""
    if not name.lower().endswith(SUFFIXES):
        raise InvalidRequestError(
            "Invalid file format for a batch: it must be JSONL, Parquet or CSV, plain, gz or zst, with a name that "
            f"ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}.",
            code="invalid_file_format",
            param=param,
        )


def check_purpose(purpose: str | None) -> None:
    """Refuse every purpose but `batch`."""
    if purpose is None:
        raise InvalidRequestError(
            "Missing required parameter: 'purpose'.", code="missing_required_parameter", param="purpose"
        )
    if purpose != PURPOSE:
        raise InvalidRequestError(
            f"'{purpose[:64]}' is not a purpose that this service takes: it runs batches, so use purpose 'batch'.",
            code="invalid_purpose",
            param="purpose",
        )


def _cut(text: str, most_bytes: int) -> str:
    """As much of a text as fits, in whole characters."""
    return text.encode()[:most_bytes].decode(errors="ignore")


def _discard(session: Session, row: File, discard: Callable[[Session, str], None]) -> None:
    discard(session, row.s3_key)
    if row.purpose == PURPOSE:
        discard(session, keys.plain_input(row.s3_key))


def _absent(session: Session, project_id: str, file_id: str) -> NoReturn:
    became = why_gone(session, project_id, file_id)
    raise NotFoundError(
        f"No such File object: {file_id}" if became is None else f"The file {file_id} is gone: {became}.",
        code=None if became is None else "file_deleted",
        param="id",
    )


def _what_became(row: File) -> str:
    if row.deleted_ms is not None and (row.expires_ms is None or row.deleted_ms < row.expires_ms):
        return f"it was deleted on {date_of(row.deleted_ms)}"
    return f"its life was over on {date_of(row.expires_ms or 0)}"


def _add(session: Session, row: File) -> File:
    session.add(row)
    session.flush()
    return row
