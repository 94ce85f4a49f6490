"""Routes of files. The upload is the one async route of the API: its bytes go to the store as they come."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from batchsvc import failpoints, ids, tracing
from batchsvc.accounts import idempotency
from batchsvc.accounts.caller import CallerDep
from batchsvc.accounts.door import default_limits
from batchsvc.accounts.idempotency import Repetition, RepetitionDep
from batchsvc.accounts.service import Caller
from batchsvc.clock import now_ns
from batchsvc.errors import InvalidRequestError, NotFoundError, UnavailableError
from batchsvc.files import life_queries, service, stored_limit
from batchsvc.files.retention import LEAST_LIFE_S, MOST_LIFE_S
from batchsvc.files.schemas import file_object
from batchsvc.files.tables import File
from batchsvc.http.conditional import is_range_meant, is_unchanged
from batchsvc.http.deps import Context, ContextDep
from batchsvc.http.description import sends, takes_form
from batchsvc.http.paging import PageArgs, page_args, page_object
from batchsvc.http.ranges import UnsatisfiableRangeError, span
from batchsvc.http.uploads import Field, FileData, FileStart, Form, Stored, StoreSink, check_length, least_bytes
from batchsvc.store import keys

router = APIRouter(prefix="/v1/files")
FilePage = Annotated[PageArgs, Depends(page_args(default=10_000, most=10_000))]
_CONTENT = sends(
    "application/octet-stream",
    _206={"description": "The span of the header `Range`.", "content": {"application/octet-stream": {}}},
    _304={"description": "It is the version that `If-None-Match` names."},
    _307={"description": "It is read from the store itself, at `Location`."},
    _416={"description": "The span of `Range` lies outside.", "content": {"application/json": {}}},
)


@router.post("", openapi_extra=takes_form("file", "purpose", "expires_after[anchor]", "expires_after[seconds]"))
async def create_file(
    request: Request, caller: CallerDep, context: ContextDep, repetition: RepetitionDep
) -> dict[str, Any]:
    """Upload a file. Fields: `file`, `purpose`, and at will `expires_after[anchor]` with `expires_after[seconds]`."""
    file_id, began_ns = ids.file_id(), now_ns()
    key = keys.input_file(caller.project_id, file_id)
    form = Form(request.headers.get("content-type"))
    length = request.headers.get("content-length")
    check_length(length, context.settings.max_input_bytes)
    await run_in_threadpool(_check_room, context, caller, least_bytes(length))
    sink = StoreSink(context.store, key, context.settings.max_input_bytes)
    try:
        filename, life_s = await _receive(request, form, sink)
        stored = await sink.finish()
        failpoints.reach("file.stored")
    except BaseException:
        await sink.abandon()
        raise
    upload = _Upload(file_id=file_id, s3_key=key, filename=filename, stored=stored, life_s=life_s)
    shown = await run_in_threadpool(_record, context, caller, upload, repetition)
    if shown["id"] == file_id:
        tracing.uploaded(file_id, began_ns=began_ns)
    return shown


@router.get("")
def list_files(
    caller: CallerDep,
    context: ContextDep,
    page: FilePage,
    purpose: Annotated[str | None, Query(max_length=32)] = None,
) -> dict[str, Any]:
    """Files of the project, newest first unless `order=asc`."""
    with context.db.reading() as session:
        found = service.list_files(session, caller.project_id, page, purpose)
        return page_object(found, page.limit, file_object)


@router.get("/{file_id}")
def retrieve_file(caller: CallerDep, context: ContextDep, file_id: str) -> dict[str, Any]:
    """One file."""
    with context.db.reading() as session:
        return file_object(service.get(session, caller.project_id, file_id))


@router.delete("/{file_id}")
def delete_file(caller: CallerDep, context: ContextDep, file_id: str) -> dict[str, Any]:
    """Delete a file, unless a batch still reads it."""
    with context.db.transaction() as session:
        row = service.delete(
            session, caller.project_id, file_id, live_batch_of=context.live_batch_of, discard=context.discard
        )
        return {"id": row.id, "object": "file", "deleted": True}


@router.get("/{file_id}/content", response_class=StreamingResponse, responses=_CONTENT)
def file_content(caller: CallerDep, context: ContextDep, file_id: str, request: Request) -> Response:
    """The bytes of a file, streamed, or a redirect to a public store; one `Range` is honoured with 206."""
    with context.db.reading() as session:
        row = service.get(session, caller.project_id, file_id)
    if row.source_uri and not row.sha256:
        raise InvalidRequestError(
            f"{row.id} isn't copied from {row.source_uri} yet: its first batch or quote does that.",
            code="file_not_copied",
            param="file_id",
        )
    given = request.headers
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": f'"{row.sha256}"',
        "Cache-Control": "private, no-cache",
        "Content-Disposition": _disposition(row.filename),
    }
    if is_unchanged(given.get("if-none-match"), row.sha256):
        return Response(status_code=304, headers=headers)
    if "if-range" not in given and (url := context.store.public_url(row.s3_key, headers["Content-Disposition"])):
        return RedirectResponse(url, 307, {"Cache-Control": "no-store"})  # which knows Range, but not our tag
    is_meant = is_range_meant(given.get("if-range"), row.sha256)
    try:
        wanted = span(given.get("range"), row.size_bytes) if is_meant else None
    except UnsatisfiableRangeError:
        refused = InvalidRequestError(f"The file has {row.size_bytes} bytes.", code="range_not_satisfiable")
        return JSONResponse(refused.envelope(), 416, {"Content-Range": f"bytes */{row.size_bytes}"})
    start, end = wanted or (0, row.size_bytes)
    if wanted:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{row.size_bytes}"
    headers["Content-Length"] = str(end - start)
    return StreamingResponse(
        _bytes(context, row, start, end),
        status_code=206 if wanted else 200,
        headers=headers,
        media_type="application/octet-stream",
    )


async def _receive(request: Request, form: Form, sink: StoreSink) -> tuple[str, int | None]:
    """Pass the file on to the sink. Returns its name and the life in seconds that it shall have, if the call says so;
    refuses what it can while it comes."""
    fields: dict[str, str] = {}
    filename: str | None = None
    async for piece in request.stream():
        for event in form.feed(piece) if piece else ():
            match event:
                case FileData(data):
                    await sink.write(data)
                case FileStart(name, raw):
                    if name != "file" or filename is not None:
                        raise InvalidRequestError("The form must hold one file, in the field 'file'.", param="file")
                    filename = service.clean_filename(raw)
                    service.check_filename(filename)
                case Field(name, value):
                    fields[name] = value
                    if name == "purpose":
                        service.check_purpose(value)
    if not form.is_complete:
        raise InvalidRequestError("The request's body ends in the middle of the form.", code="invalid_body")
    service.check_purpose(fields.get("purpose"))
    if filename is None:
        raise InvalidRequestError(
            "Missing required parameter: 'file'.", code="missing_required_parameter", param="file"
        )
    return filename, _life_s(fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upload:
    """A file that has come in whole, and that nobody knows of yet."""

    file_id: str
    s3_key: str
    filename: str
    stored: Stored
    life_s: int | None


def _check_room(context: Context, caller: Caller, num_bytes: int) -> None:
    with context.db.reading() as session:
        stored_limit.check_room(session, caller, num_bytes, default_limits(context.settings))


def _record(context: Context, caller: Caller, upload: _Upload, repetition: Repetition) -> dict[str, Any]:
    """Make the file known, or find the one that the same call has made before: then its bytes are here twice."""
    arguments = {"filename": upload.filename, "sha256": upload.stored.sha256, "life_s": upload.life_s}

    def add(session: Session) -> dict[str, Any]:
        setting_s = context.settings.file_ttl_s
        row = service.add_upload(
            session,
            file_id=upload.file_id,
            project_id=caller.project_id,
            filename=upload.filename,
            s3_key=upload.s3_key,
            etag=upload.stored.etag,
            sha256=upload.stored.sha256,
            size_bytes=upload.stored.size_bytes,
            life_s=life_queries.input_life_s(session, caller.project_id, upload.life_s, setting_s),
            is_retry=repetition.is_retry,
        )
        return file_object(stored_limit.count(session, caller, row, default_limits(context.settings)))

    try:
        shown = context.db.run(
            lambda session: idempotency.once(
                session, caller.project_id, "files", repetition.key, arguments, partial(add, session)
            )
        )
    except BaseException:
        if not _may_stand(context, caller, upload.file_id):
            context.store.delete([upload.s3_key])
        raise
    if shown["id"] != upload.file_id:
        context.store.delete([upload.s3_key])
    return shown


def _may_stand(context: Context, caller: Caller, file_id: str) -> bool:
    """Whether a failed commit may have been done after all; an object that nobody knows is the audit's."""
    try:
        with context.db.reading() as session:
            return service.find_stored(session, caller.project_id, file_id) is not None
    except SQLAlchemyError:
        return True


def _bytes(context: Context, row: File, start: int, end: int) -> Iterator[bytes]:
    """The bytes [start, end) of a file. The first piece is fetched here, while an error can still be answered."""
    pieces = context.store.stream(row.s3_key, start=start, end=end, etag=row.etag or None) if end > start else iter(())
    try:
        first = next(pieces, b"")
    except NotFoundError as error:
        raise UnavailableError(f"The bytes of {row.id} are missing from the store.", code="content_missing") from error
    return chain([first], pieces)


def _life_s(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequestError("expires_after[anchor] must be 'created_at'.", param="expires_after[anchor]")
    lowest, highest = LEAST_LIFE_S, MOST_LIFE_S
    is_number = seconds is not None and re.fullmatch(r"[0-9]{1,9}", seconds) is not None
    if seconds is None or not is_number or not lowest <= int(seconds) <= highest:
        raise InvalidRequestError(
            f"expires_after[seconds] must be {lowest} to {highest}.", param="expires_after[seconds]"
        )
    return int(seconds)


def _disposition(filename: str) -> str:
    plain = filename.encode("ascii", "replace").decode().replace('"', "_").replace("\\", "_").replace("?", "_")
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"
