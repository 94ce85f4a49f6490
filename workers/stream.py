"""A result stream: rows appended in pieces become one S3 object, by multipart upload once it is large.

S3 refuses small parts, so what is under `PART_BYTES` is carried on to the next append; a stream that stays under it
is one PUT, and a stream without rows is no object at all. Threads upload parts while the next ones are put together;
at most `_MOST_SENDING` of them are on their way. The object is written once, under a token of this stream: an answer
that gets lost is found in the store.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from batchsvc.batches.window_spool import Rows
from batchsvc.errors import NotFoundError
from batchsvc.store.s3 import BusyError, ObjectStore

PART_BYTES = 8 * 1024 * 1024
_THREADS = 4  # while some wait for the store, others send
_MOST_SENDING = 8
_GROWS_EVERY = 1_000  # parts; S3 takes 10,000
_CONTENT_TYPE = "application/jsonl"


class UploadLostError(Exception):
    """The store doesn't know the upload any more, or wants it to begin again."""


@dataclass(frozen=True, slots=True)
class StreamedObject:
    """What a stream became."""

    s3_key: str
    etag: str
    sha256: str
    size_bytes: int


class ResultStream:
    """Writes one object. `on_upload` gets the id of a multipart upload as soon as there is one; `persist` calls the
    store, as often as it likes. Call `close` at the end, whatever came before.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        *,
        on_upload: Callable[[str, str], None],
        persist: Callable[[Callable[[], str]], str] = lambda call: call(),
    ) -> None:
        self.key = key
        self.num_lines = 0
        self._store = store
        self._on_upload = on_upload
        self._persist = persist
        self._writer = secrets.token_hex(16)
        self._carry = bytearray()
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        self._upload_id: str | None = None
        self._etags: list[str] = []
        self._uploader = ThreadPoolExecutor(_THREADS, f"upload-{key.rpartition('/')[2]}")
        self._num_sent = 0
        self._sending: deque[Future[str]] = deque()

    def append(self, rows: Rows) -> None:
        """Add rows. Raises UploadLostError, also for earlier rows."""
        self.num_lines += rows.num_lines
        left = memoryview(rows.data)
        while len(self._carry) + len(left) >= (part_bytes := PART_BYTES * (1 + self._num_sent // _GROWS_EVERY)):
            cut = part_bytes - len(self._carry)
            self._send(b"".join((self._carry, left[:cut])))
            self._carry, left = bytearray(), left[cut:]
        self._carry += left

    def finish(self) -> StreamedObject | None:
        """Complete the object; None if the stream had no rows. Raises UploadLostError."""
        if not self.num_lines:
            return None
        if self._upload_id is None:
            data = bytes(self._carry)
            self._count(data)
            etag = self._call(lambda: self._store.put(self.key, data, content_type=_CONTENT_TYPE, writer=self._writer))
        else:
            etag = self._complete(self._upload_id)
        return StreamedObject(self.key, etag, self._hash.hexdigest(), self._size_bytes)

    def close(self) -> None:
        """End the threads, after what they are doing."""
        self._uploader.shutdown(cancel_futures=True)

    def abort(self) -> None:
        """Give an unfinished upload up."""
        if self._upload_id is not None:
            self._store.abort_multipart(self.key, self._upload_id)

    def _complete(self, upload_id: str) -> str:
        if self._carry:
            self._send(bytes(self._carry))
        self._wait(0)
        return self._call(
            lambda: self._store.complete_multipart(
                self.key, upload_id, self._etags, writer=self._writer, size_bytes=self._size_bytes
            )
        )

    def _send(self, data: bytes) -> None:
        if self._upload_id is None:
            self._upload_id = self._call(
                lambda: self._store.start_multipart(self.key, content_type=_CONTENT_TYPE, writer=self._writer)
            )
            self._on_upload(self.key, self._upload_id)
        self._count(data)
        self._wait(_MOST_SENDING - 1)
        self._num_sent += 1
        self._sending.append(self._uploader.submit(self._upload, self._upload_id, self._num_sent, data))

    def _wait(self, most: int) -> None:
        while len(self._sending) > most:
            self._etags.append(self._sending.popleft().result())

    def _upload(self, upload_id: str, number: int, data: bytes) -> str:
        return self._call(lambda: self._store.upload_part(self.key, upload_id, number, data))

    def _call(self, call: Callable[[], str]) -> str:
        try:
            return self._persist(call)
        except (NotFoundError, BusyError) as error:
            raise UploadLostError from error

    def _count(self, data: bytes) -> None:
        self._hash.update(data)
        self._size_bytes += len(data)
