"""Routes of uploads: a file that is too large, or a line that is too bad, for one call comes in parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from batchsvc import ids, tracing
from batchsvc.accounts import idempotency
from batchsvc.accounts.caller import CallerDep
from batchsvc.accounts.door import default_limits
from batchsvc.accounts.idempotency import ArrivalDep, RepetitionDep, Sent
from batchsvc.clock import now_ns
from batchsvc.errors import InvalidRequestError, NotFoundError, ServiceError, UnavailableError
from batchsvc.files import life_queries, stored_limit
from batchsvc.files import service as files
from batchsvc.files import upload_service as service
from batchsvc.files.tables import Upload
from batchsvc.files.upload_schemas import CompleteUpload, CreateUpload, part_object, upload_object
from batchsvc.files.upload_service import Assembly
from batchsvc.http.deps import Context, ContextDep
from batchsvc.http.description import takes_form
from batchsvc.http.uploads import FileData, FileStart, Form, StoreSink, check_length
from batchsvc.store import keys

router = APIRouter(prefix="/v1/uploads")


@router.post("")
def create_upload(
    caller: CallerDep,
    context: ContextDep,
    arrived_ms: ArrivalDep,
    body: CreateUpload,
    repetition: RepetitionDep,
) -> dict[str, Any]:
    """Begin a file of a known length that comes in parts. Sent again unasked, it finds the upload that it has begun,
    unless something has come into that since: then it was another call that said the same."""
    upload_id, settings = ids.upload_id(), context.settings

    def create(session: Session) -> dict[str, Any]:
        asked_s = body.expires_after.seconds if body.expires_after else None
        row = service.create(
            session,
            caller.project_id,
            body,
            upload_id=upload_id,
            ttl_s=settings.upload_ttl_s,
            life_s=life_queries.input_life_s(session, caller.project_id, asked_s, settings.file_ttl_s),
            max_bytes=settings.max_input_bytes,
        )
        stored_limit.count_upload(session, caller, row.id, row.size_bytes, default_limits(settings))
        return upload_object(row, row.status)

    digest = idempotency.digest_of(body.model_dump())
    sent = Sent(repetition=repetition, api_key_id=caller.api_key_id, digest=digest, arrived_ms=arrived_ms)
    made = context.db.run(
        lambda session: idempotency.once_sent(session, caller.project_id, "uploads", sent, partial(create, session))
    )
    if repetition.is_retry and made["id"] != upload_id:
        with context.db.reading() as session:
            is_fresh = service.is_fresh(session, caller.project_id, made["id"])
        if not is_fresh:
            return context.db.run(create)
    return made


@router.post("/{upload_id}/parts", openapi_extra=takes_form("data"))
async def add_part(request: Request, caller: CallerDep, context: ContextDep, upload_id: str) -> dict[str, Any]:
    """Add a part: a form with one file in the field `data`. Parts may come side by side and in any order."""

    def look() -> None:
        with context.db.reading() as session:
            service.get_pending(session, caller.project_id, upload_id)

    await run_in_threadpool(look)
    form = Form(request.headers.get("content-type"))
    check_length(request.headers.get("content-length"), service.MAX_PART_BYTES, "part", "data")
    part_id = ids.upload_part_id()
    key = keys.upload_part(caller.project_id, upload_id, part_id)
    sink = StoreSink(context.store, key, service.MAX_PART_BYTES, "part", "data")
    try:
        await _receive(request, form, sink)
        stored = await sink.finish()
    except BaseException:
        await sink.abandon()
        raise

    def record(session: Session) -> dict[str, Any]:
        most = context.settings.max_input_bytes
        row = service.add_part(
            session, caller.project_id, upload_id, part_id=part_id, s3_key=key, stored=stored, max_bytes=most
        )
        stored_limit.count_upload(session, caller, upload_id, row.size_bytes, default_limits(context.settings))
        return part_object(row)

    try:
        return await run_in_threadpool(context.db.run, record)
    except ServiceError:  # nothing was recorded; after any other error it may be, and the audit looks
        await run_in_threadpool(context.store.delete, [key])
        raise


@router.post("/{upload_id}/complete")
async def complete_upload(
    caller: CallerDep, context: ContextDep, upload_id: str, body: CompleteUpload
) -> dict[str, Any]:
    """Make one file of the parts, in the order of `part_ids`. The same call again is answered with the same file."""

    def look() -> Assembly | dict[str, Any]:
        with context.db.reading() as session:
            found = service.assembly(session, caller.project_id, upload_id, body)
            return found if isinstance(found, Assembly) else _shown(session, found)

    whole = await run_in_threadpool(look)
    if not isinstance(whole, Assembly):
        return whole
    file_id, began_ns = ids.file_id(), now_ns()
    key = keys.input_file(caller.project_id, file_id)
    sink = StoreSink(context.store, key, context.settings.max_input_bytes)
    try:
        async for piece in iterate_in_threadpool(_joined(context, whole)):
            await sink.write(piece)
        stored = await sink.finish()
    except BaseException:
        await sink.abandon()
        raise

    def record(session: Session) -> dict[str, Any]:
        row = service.complete(session, whole, file_id=file_id, s3_key=key, stored=stored, discard=context.discard)
        if (file := files.find_stored(session, caller.project_id, row.file_id or "")) is not None:
            stored_limit.count(session, caller, file, default_limits(context.settings))
        return _shown(session, row)

    try:
        shown = await run_in_threadpool(context.db.run, record)
    except ServiceError:
        await run_in_threadpool(context.store.delete, [key])
        raise
    if shown["file"]["id"] != file_id:  # another call was faster
        await run_in_threadpool(context.store.delete, [key])
    else:
        tracing.uploaded(file_id, began_ns=began_ns)
    return shown


@router.post("/{upload_id}/cancel")
def cancel_upload(caller: CallerDep, context: ContextDep, upload_id: str) -> dict[str, Any]:
    """Give an upload up; its parts are deleted."""
    return context.db.run(
        lambda session: _shown(session, service.cancel(session, caller.project_id, upload_id, discard=context.discard))
    )


async def _receive(request: Request, form: Form, sink: StoreSink) -> None:
    """Pass the one file of a form on to the sink."""
    num_files = 0
    async for piece in request.stream():
        for event in form.feed(piece) if piece else ():
            match event:
                case FileData(data):
                    await sink.write(data)
                case FileStart(name, _):
                    num_files += 1
                    if name != "data" or num_files > 1:
                        raise _no_data()
                case _:
                    pass
    if not form.is_complete:
        raise InvalidRequestError("The request's body ends in the middle of the form.", code="invalid_body")
    if not num_files:
        raise _no_data()


def _joined(context: Context, whole: Assembly) -> Iterator[bytes]:
    """The bytes of all parts, one after the other; at their end the MD5 is judged, before the file can be seen."""
    md5 = hashlib.md5(usedforsecurity=False)
    for part in whole.parts:
        try:
            for piece in context.store.stream(part.s3_key, end=part.size_bytes, etag=part.etag):
                md5.update(piece)
                yield piece
        except NotFoundError as error:
            raise UnavailableError(
                f"The bytes of {part.id} are missing from the store: create a new upload.", code="content_missing"
            ) from error
    if whole.md5 is not None and md5.hexdigest() != whole.md5:
        raise InvalidRequestError(
            f"md5: the parts in this order have {md5.hexdigest()}, not {whole.md5}: is their order right?",
            code="md5_mismatch",
            param="md5",
        )


def _shown(session: Session, row: Upload) -> dict[str, Any]:
    file = files.find_stored(session, row.project_id, row.file_id) if row.file_id else None
    return upload_object(row, service.status_of(session, row), file)


def _no_data() -> InvalidRequestError:
    return InvalidRequestError(
        "A part is a form with one file, in the field 'data'.", code="missing_required_parameter", param="data"
    )
