"""Where the input of a new batch comes from, besides a file that was uploaded before: requests in the call itself, or
an object in a store that is registered for the project.

Requests are written into an input file, line by line, before the batch is made; of an object the version that it has
now is pinned, and its bytes are copied when the batch is planned (files/importing.py). From there on it is a batch like
any other. The file's row and the batch's are one transaction, so that neither is there without the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts.service import Caller
from batchsvc.batches import service
from batchsvc.batches.schemas import CreateBatch
from batchsvc.errors import InvalidRequestError, ServiceError
from batchsvc.files import importing, life_queries
from batchsvc.files import service as files
from batchsvc.files.s3_uri import S3Uri, is_s3, parse_object
from batchsvc.files.tables import File
from batchsvc.http.deps import Context
from batchsvc.http.uploads import Stored, check_size, sha256_of
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectInfo, ObjectStore

_INLINE_NAME = "requests.jsonl"


class NewInput(Protocol):
    """An input that has no row yet. `record` gives it one, or finds the one that the same call has made before;
    `forget` is for an input whose call was answered by another one's batch."""

    @property
    def file_id(self) -> str: ...
    def record(self, session: Session, *, is_retry: bool) -> File: ...
    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineInput:
    """Requests of a call, stored as a file."""

    store: ObjectStore
    project_id: str
    file_id: str
    s3_key: str
    stored: Stored
    setting_life_s: int

    def record(self, session: Session, *, is_retry: bool) -> File:
        return files.add_upload(
            session,
            file_id=self.file_id,
            project_id=self.project_id,
            filename=_INLINE_NAME,
            s3_key=self.s3_key,
            etag=self.stored.etag,
            sha256=self.stored.sha256,
            size_bytes=self.stored.size_bytes,
            life_s=life_queries.input_life_s(session, self.project_id, None, self.setting_life_s),
            is_retry=is_retry,
        )

    def forget(self) -> None:
        self.store.delete([self.s3_key])


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Input:
    """An object in a tenant's store, at one version."""

    project_id: str
    file_id: str
    s3_key: str
    source: S3Uri
    found: ObjectInfo
    setting_life_s: int

    def record(self, session: Session, *, is_retry: bool) -> File:
        """Its row; the same version is the same file, whoever asks again."""
        return files.add_import(
            session,
            file_id=self.file_id,
            project_id=self.project_id,
            s3_key=self.s3_key,
            source=self.source,
            source_etag=self.found.etag,
            size_bytes=self.found.size_bytes,
            life_s=life_queries.input_life_s(session, self.project_id, None, self.setting_life_s),
        )

    def forget(self) -> None:
        """Nothing is stored yet."""


@contextmanager
def opened(context: Context, caller: Caller, body: CreateBatch) -> Iterator[NewInput | None]:
    """The input that a call brings along; None: it names a file. Raises InvalidRequestError for none, or two."""
    _check_one(body)
    if body.requests is None:
        if is_s3(body.input_file_id or ""):  # then both ends are judged before one of them is asked
            with context.db.reading() as session:
                service.output_prefix(session, caller.project_id, body, context.settings)
        yield s3_input(context, caller, body.input_file_id or "")
        return
    with stored_inline(context, caller, body.requests, body.endpoint) as made:
        yield made


def s3_input(context: Context, caller: Caller, input_file_id: str) -> S3Input | None:
    """The object that a call names as its input, as it is now; None: it names a file.

    Raises PermissionDeniedError, before anything is sent, for what isn't registered for the project.
    """
    if not is_s3(input_file_id):
        return None
    source, settings = parse_object(input_file_id, importing.PARAM), context.settings
    found = importing.head(context.db, caller.project_id, source, settings)
    check_size(found.size_bytes, settings.max_input_bytes, param=importing.PARAM)
    file_id = ids.file_id()
    return S3Input(
        project_id=caller.project_id,
        file_id=file_id,
        s3_key=keys.input_file(caller.project_id, file_id),
        source=source,
        found=found,
        setting_life_s=settings.file_ttl_s,
    )


@contextmanager
def stored_inline(
    context: Context, caller: Caller, requests: Sequence[Mapping[str, Any]], endpoint: str
) -> Iterator[InlineInput]:
    """Requests as an input file whose bytes are stored; they go again if the block is refused."""
    file_id = ids.file_id()
    key = keys.input_file(caller.project_id, file_id)
    data = b"".join(inline_lines(requests, endpoint))
    etag = context.store.put(key, data)
    stored = Stored(etag=etag, sha256=sha256_of(data), size_bytes=len(data))
    made = InlineInput(
        store=context.store,
        project_id=caller.project_id,
        file_id=file_id,
        s3_key=key,
        stored=stored,
        setting_life_s=context.settings.file_ttl_s,
    )
    with deleted_if_refused(context.store, key):
        yield made


@contextmanager
def deleted_if_refused(store: ObjectStore, key: str) -> Iterator[None]:
    """Delete an object that no row names, because what was to name it was refused.

    After any other error a row may name it all the same; then it is the audit that looks.
    """
    try:
        yield
    except ServiceError:
        store.delete([key])
        raise


def inline_lines(requests: Sequence[Mapping[str, Any]], endpoint: str) -> Iterator[bytes]:
    """The lines of an input file: what a request leaves out of `method` and `url` is what its batch implies."""
    for number, request in enumerate(requests):
        try:
            yield orjson.dumps({"method": "POST", "url": endpoint, **request}, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError as error:  # such as nesting without end
            where = f"requests.{number}"
            raise InvalidRequestError(
                f"{where}: this can't be written as a line of JSON.", code="invalid_value", param=where
            ) from error


def _check_one(body: CreateBatch) -> None:
    given = [name for name in ("input_file_id", "requests") if getattr(body, name)]
    if not given:
        raise InvalidRequestError(
            "Missing required parameter: 'input_file_id' (or 'requests', to send them in the call itself).",
            code="missing_required_parameter",
            param="input_file_id",
        )
    if len(given) > 1:
        raise InvalidRequestError(
            f"{given[1]}: a batch has one input, and {given[0]} names another one.",
            code="invalid_value",
            param=given[1],
        )
