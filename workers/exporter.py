"""Takes results into the stores of tenants: the output, the errors, and last a manifest that says what is there.

Whoever reads the manifest finds all that it names, because it is written last, and for every end of a batch, so that
nobody waits for what never comes. An exporter that dies leaves a lease that runs out and the ids of uploads that it had
begun; whoever takes over ends these and writes everything again, under the same names and byte by byte the same.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from batchsvc import failpoints, logs
from batchsvc.batches import export_queries, service
from batchsvc.batches.export_queries import ExportClaim
from batchsvc.batches.kept_lease import KeptLease, LeaseLostError
from batchsvc.batches.manifest import MANIFEST, ExportedFile, manifest, object_name
from batchsvc.db.session import Database
from batchsvc.errors import NotFoundError, ServiceError, UnavailableError
from batchsvc.files import service as files
from batchsvc.files import store_service
from batchsvc.files.s3_uri import S3Uri, parse_prefix
from batchsvc.files.tables import File
from batchsvc.sealing import WRONG_KEY
from batchsvc.settings import Settings
from batchsvc.store.foreign import ForeignBucket
from batchsvc.store.pieces import put_pieces
from batchsvc.store.s3 import ObjectStore
from workers.senders import Senders

P = ParamSpec("P")

_SENDERS = 4
_LINES_TYPE, _MANIFEST_TYPE = "application/jsonl", "application/json"

log = structlog.get_logger(__name__)


class _GoneError(Exception):
    """The results were deleted before they were exported."""


class _StoppedError(Exception):
    """The process ends."""


@dataclass(frozen=True, slots=True)
class _Results:
    """An ended batch as the API shows it, and its files by kind, each with its number of lines."""

    shown: dict[str, Any]
    files: list[tuple[str, File, int]]


class Exporter(Senders[ExportClaim]):
    """The exporters of one control process."""

    def __init__(self, settings: Settings, db: Database, store: ObjectStore) -> None:
        super().__init__("exports", _SENDERS)
        self._settings = settings
        self._db = db
        self._store = store
        self._owner = f"{socket.gethostname()}:exporter:{uuid.uuid4().hex}"

    def _look(self) -> int:
        with self._db.reading() as session:
            return export_queries.num_due(session)

    def _claim(self) -> ExportClaim | None:
        if not self._look():
            return None
        return self._db.run(partial(export_queries.claim, owner=self._owner, lease_s=self._settings.lease_s))

    def _serve(self, claimed: ExportClaim) -> int:
        renew = partial(export_queries.keep, claimed=claimed, lease_s=self._settings.lease_s)
        lease = KeptLease(lambda: self._db.run(renew), self._settings.renew_s)
        try:
            with lease:
                _Attempt(self._settings, self._db, self._store, claimed, partial(self._check, lease)).run()
        except LeaseLostError:
            log.info("export.lost", batch=claimed.batch_id, epoch=claimed.epoch)
        except _StoppedError:
            self._db.run(partial(export_queries.give_back, claimed=claimed))
        except _GoneError as error:
            self._failed(claimed, str(error), is_final=True)
        except ServiceError as error:
            if error.code == WRONG_KEY:  # not the tenant's fault, and no attempt
                log.warning("export.postponed", batch=claimed.batch_id, reason=error.message)
                self._db.run(partial(export_queries.postpone, claimed=claimed, reason=error.message))
            else:
                self._failed(claimed, error.message)
        except DBAPIError:
            raise
        except Exception as error:  # a server may answer anything
            log.warning("export.broken", batch=claimed.batch_id, **logs.where(error))
            self._failed(claimed, "The store's answer can't be understood.")
        return 1

    def _failed(self, claimed: ExportClaim, reason: str, *, is_final: bool = False) -> None:
        state = self._db.run(partial(export_queries.fail, claimed=claimed, reason=reason, is_final=is_final))
        log.warning("export.failed", batch=claimed.batch_id, reason=reason, state=state)

    def _check(self, lease: KeptLease) -> None:
        lease.check()
        if self._stopped.is_set():
            raise _StoppedError


class _Attempt:
    """One attempt at one export, under one epoch. `check` is called often, and raises when it must stop."""

    def __init__(
        self, settings: Settings, db: Database, store: ObjectStore, claimed: ExportClaim, check: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._db = db
        self._store = store
        self._claimed = claimed
        self._check = check
        self._folder = parse_prefix(claimed.prefix, "output_s3").below(f"{claimed.batch_id}/")

    def run(self) -> None:
        """Write all objects, the manifest last."""
        try:
            results = self._results()
        except _GoneError:
            if self._claimed.uploads:
                with closing(self._target()) as target:
                    self._clear(target)
            raise
        with closing(self._target()) as target:
            self._clear(target)
            written = [self._write(target, kind, file, num_lines) for kind, file, num_lines in results.files]
            failpoints.reach("export.copied")
            self._check()
            data = manifest(results.shown, written)
            target.put(self._folder.below(MANIFEST).key, data, content_type=_MANIFEST_TYPE)
        failpoints.reach("export.completed")
        self._fenced(export_queries.finish)
        log.info("export.done", batch=self._claimed.batch_id, objects=len(written) + 1)

    def _target(self) -> ForeignBucket:
        with self._db.reading() as session:
            access = store_service.access(session, self._claimed.project_id, self._folder, self._settings, "output_s3")
        return store_service.opened(access, self._settings)

    def _results(self) -> _Results:
        with self._db.reading() as session:
            try:
                batch = service.get(session, self._claimed.project_id, self._claimed.batch_id)
            except NotFoundError as error:
                raise _GoneError(export_queries.WAS_DELETED) from error
            found: list[tuple[str, File, int]] = []
            for kind, file_id, num_lines in (
                ("output", batch.output_file_id, batch.completed),
                ("error", batch.error_file_id, batch.failed),
            ):
                if file_id is None:
                    continue
                file = files.find_stored(session, batch.project_id, file_id)
                if file is None:
                    raise _GoneError(f"{file_id} was deleted, or its life was over, before it could be exported.")
                found.append((kind, file, num_lines))
            return _Results(service.show(session, [batch], self._settings.renew_s)[0], found)

    def _clear(self, target: ForeignBucket) -> None:
        """End the uploads that an earlier attempt has begun; one that can't be ended is the store's to forget."""
        if not self._claimed.uploads:
            return
        for key, upload_id in self._claimed.uploads:
            with suppress(ServiceError):
                target.abort_multipart(key, upload_id)
        self._fenced(export_queries.note_cleared)

    def _write(self, target: ForeignBucket, kind: str, file: File, num_lines: int) -> ExportedFile:
        uri = self._folder.below(object_name(kind))
        stored = put_pieces(
            target,
            uri.key,
            self._bytes(file),
            content_type=_LINES_TYPE,
            keep=self._check,
            on_upload=partial(self._begun, uri),
        )
        if (stored.sha256, stored.size_bytes) != (file.sha256, file.size_bytes):
            raise UnavailableError(f"The bytes of {file.id} aren't those that were published.", code="content_damaged")
        return ExportedFile(
            kind=kind, uri=str(uri), num_lines=num_lines, size_bytes=stored.size_bytes, sha256=stored.sha256
        )

    def _bytes(self, file: File) -> Iterator[bytes]:
        try:
            yield from self._store.stream(file.s3_key, etag=file.etag or None)
        except NotFoundError as error:
            raise _GoneError(f"The bytes of {file.id} are gone from our store.") from error

    def _begun(self, uri: S3Uri, upload_id: str) -> None:
        self._fenced(export_queries.note_upload, key=uri.key, upload_id=upload_id)
        failpoints.reach("export.begun")

    def _fenced(
        self, change: Callable[Concatenate[Session, ExportClaim, P], bool], *args: P.args, **options: P.kwargs
    ) -> None:
        if not self._db.run(lambda session: change(session, self._claimed, *args, **options)):
            raise LeaseLostError
