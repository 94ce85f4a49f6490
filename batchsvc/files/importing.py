"""Copies an input from a tenant's store into our own bucket, at the version that was pinned when its batch was created.

Planning goes through a file window by window, repairs read it again, and a retry reads it weeks later; so the bytes are
copied once, before the first window, and from then on it is a file like any other. Every read names the pinned ETag:
an object that was replaced, before or in the middle, ends the import, and lines of two versions never mix. The copy is
made whole or not at all and carries the pinned version in its writer, so whoever comes second finds it.

A store that doesn't answer is asked again later, a few times and longer apart each time; whoever plans does other work
meanwhile. What can't get better by waiting ends the import at once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import structlog
from sqlalchemy import ColumnElement

from batchsvc import failpoints, logs
from batchsvc.clock import monotonic_s
from batchsvc.db.session import Database
from batchsvc.egress import EgressError
from batchsvc.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, ServiceError, UnavailableError
from batchsvc.files import s3_uri, service, store_service
from batchsvc.files.s3_uri import S3Uri
from batchsvc.files.tables import File
from batchsvc.sealing import WRONG_KEY
from batchsvc.settings import Settings
from batchsvc.store.foreign import RefusedError
from batchsvc.store.pieces import StoredObject, put_pieces
from batchsvc.store.s3 import ObjectInfo, ObjectStore, OtherVersionError

PARAM = "input_file_id"
_WAITS_S = (5.0, 30.0, 120.0, 300.0, 600.0)  # between attempts; after the last one it is given up
_MAX_ETAG_CHARS = 128
_SLOW_S, _LEAST_BYTES_PER_S = 60.0, 256 * 1024  # a store that drips would hold a planner for ever
_CHUNK_BYTES, _LOOK_S = 64 * 1024, 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the bytes of a file are that hasn't been copied yet."""

    file_id: str
    project_id: str
    s3_key: str
    uri: str
    etag: str
    size_bytes: int


class ImportFailedError(Exception):
    """The file will never be here; `code` says why, and the message does in a sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class PutOffError(Exception):
    """The store can't be read now; somebody should try again after this time."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"again in {wait_s:g} s")
        self.wait_s = wait_s


class _SilentError(Exception):
    """The tenant's store can't be read now."""


def origin_of(file: File) -> Origin | None:
    """Where a file has to be copied from; None: its bytes are here."""
    if file.source_uri is None or file.sha256:
        return None
    return Origin(
        file_id=file.id,
        project_id=file.project_id,
        s3_key=file.s3_key,
        uri=file.source_uri,
        etag=file.source_etag or "",
        size_bytes=file.size_bytes,
    )


def is_abroad() -> tuple[ColumnElement[bool], ...]:
    """The same as conditions on a file's row."""
    return (File.source_uri.is_not(None), File.sha256 == "")


def head(db: Database, project_id: str, uri: S3Uri, settings: Settings) -> ObjectInfo:
    """Size and version of the object that a call names. Raises a ServiceError that names the parameter.

    Whether the project may reach it is known before anything is sent.
    """
    with db.reading() as session:
        access = store_service.access(session, project_id, uri, settings, PARAM)
    try:
        with closing(store_service.opened(access, settings)) as store:
            found = store.head(uri.key)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{PARAM}: {error.message}", code=error.code, param=PARAM) from error
    except (KeyError, ValueError) as error:
        raise _strange(uri) from error
    if found is not None and not 0 < len(found.etag) <= _MAX_ETAG_CHARS:
        raise _strange(uri)
    if found is None:
        raise InvalidRequestError(f"{PARAM}: there is no object {uri}.", code="invalid_request", param=PARAM)
    return found


def _strange(uri: S3Uri) -> UnavailableError:
    return UnavailableError(f"The store of {uri} doesn't answer as S3 does.", code="store_unavailable", param=PARAM)


def fetch(db: Database, store: ObjectStore, settings: Settings, origin: Origin, keep: Callable[[], None]) -> str:
    """The ETag of our copy, made now if there is none. `keep` is called often, and raises when the caller must stop.

    Raises ImportFailedError or PutOffError for what the tenant's store does.
    """
    try:
        return _fetched(db, store, settings, origin, keep)
    except ImportFailedError as error:
        reason = str(error)
        db.run(lambda session: service.note_import_error(session, origin.file_id, reason))
        raise


def _fetched(db: Database, store: ObjectStore, settings: Settings, origin: Origin, keep: Callable[[], None]) -> str:
    try:
        copy = _found(store, origin, keep)
        if copy is None:
            pieces = _pieces(db, settings, origin, keep)
            copy = put_pieces(store, origin.s3_key, pieces, writer=_writer(origin), keep=keep)
            failpoints.reach("import.stored")
    except _SilentError as error:
        keep()  # it may be we who have ended it
        failures = db.run(lambda session: service.note_failure(session, origin.file_id))
        log.warning("import.failed", file=origin.file_id, failures=failures, **logs.where(error.__cause__ or error))
        if failures > len(_WAITS_S):
            says = f"{origin.uri} couldn't be read in {failures} attempts: its store doesn't answer, or breaks off."
            raise ImportFailedError("input_unavailable", says) from error
        raise PutOffError(_WAITS_S[failures - 1]) from error
    db.run(lambda session: service.note_copied(session, origin.file_id, etag=copy.etag, sha256=copy.sha256))
    log.info("import.copied", file=origin.file_id, bytes=copy.size_bytes)
    return copy.etag


def _found(store: ObjectStore, origin: Origin, keep: Callable[[], None]) -> StoredObject | None:
    """The copy that somebody made who didn't come to say so."""
    info = store.head(origin.s3_key)
    if info is None or info.writer != _writer(origin):
        return None
    sha256 = hashlib.sha256()
    for piece in store.stream(origin.s3_key, etag=info.etag):
        keep()
        sha256.update(piece)
    return StoredObject(etag=info.etag, sha256=sha256.hexdigest(), size_bytes=info.size_bytes)


def _pieces(db: Database, settings: Settings, origin: Origin, keep: Callable[[], None]) -> Iterator[bytes]:
    """The bytes of the pinned version, all of them, or an error that says what the tenant's store has done."""
    try:
        uri = s3_uri.parse_object(origin.uri, PARAM)
        with db.reading() as session:
            access = store_service.access(session, origin.project_id, uri, settings, PARAM)
        with closing(store_service.opened(access, settings)) as source, _Pace(source.cut, keep) as pace:
            yield from _whole(source.stream(uri.key, etag=origin.etag, chunk=_CHUNK_BYTES), origin.size_bytes, pace)
    except OtherVersionError as error:
        raise ImportFailedError("input_replaced", f"{origin.uri} was replaced after it was named.") from error
    except NotFoundError as error:
        raise ImportFailedError("input_not_found", f"{origin.uri} doesn't exist any more.") from error
    except (PermissionDeniedError, EgressError, RefusedError) as error:
        raise ImportFailedError(error.code or "store_refused", error.message) from error
    except (ServiceError, OSError, KeyError, ValueError) as error:  # a server may answer anything
        if isinstance(error, ServiceError) and error.code == WRONG_KEY:
            raise  # that is ours, and no attempt
        raise _SilentError from error


def _whole(pieces: Iterator[bytes], size_bytes: int, pace: _Pace) -> Iterator[bytes]:
    """The pieces, if they are as much as the store has said."""
    for piece in pieces:
        pace.passed += len(piece)
        if pace.passed > size_bytes:
            break
        yield piece
    if pace.passed != size_bytes:
        raise OtherVersionError(f"{pace.passed} bytes came, not {size_bytes}.", code="object_replaced")


class _Pace:
    """Sees that bytes come fast enough while its context lasts, and calls `cut` if they don't, or if `keep` says that
    the copy must stop: a read that waits for a store that sends a byte now and then never ends by itself."""

    def __init__(self, cut: Callable[[], None], keep: Callable[[], None]) -> None:
        self.passed = 0
        self._cut = cut
        self._keep = keep
        self._began_s = monotonic_s()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pace", daemon=True)

    def __enter__(self) -> _Pace:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            took_s = monotonic_s() - self._began_s
            is_slow = took_s > _SLOW_S and self.passed < took_s * _LEAST_BYTES_PER_S
            if is_slow or self._must_stop():
                self._cut()
                return

    def _must_stop(self) -> bool:
        try:
            self._keep()
        except Exception:
            return True
        return False


def _writer(origin: Origin) -> str:
    return f"import:{origin.etag}"
