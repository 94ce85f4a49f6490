"""A result stream: rows appended one by one become one S3 object, by multipart upload once it is large.

S3 refuses small parts, so what is under `PART_BYTES` is carried on to the next append; a stream that stays under it
is one PUT, and a stream without rows is no object at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from batchsvc.store.s3 import ObjectStore

PART_BYTES = 8 * 1024 * 1024
_CONTENT_TYPE = "application/jsonl"


@dataclass(frozen=True, slots=True)
class StreamedObject:
    """What a stream became."""

    s3_key: str
    etag: str
    sha256: str
    size_bytes: int


class ResultStream:
    """Writes one object. `on_upload` gets the id of a multipart upload as soon as there is one."""

    def __init__(self, store: ObjectStore, key: str, *, on_upload: Callable[[str, str], None]) -> None:
        self.key = key
        self.num_lines = 0
        self._store = store
        self._on_upload = on_upload
        self._carry = bytearray()
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        self._upload_id: str | None = None
        self._etags: list[str] = []

    def append(self, row: bytes) -> None:
        """Add a row, without its newline."""
        self._carry += row
        self._carry += b"\n"
        self.num_lines += 1
        if len(self._carry) >= PART_BYTES:
            self._send()

    def finish(self) -> StreamedObject | None:
        """Complete the object; None if the stream had no rows."""
        if not self.num_lines:
            return None
        if self._upload_id is None:
            data = bytes(self._carry)
            self._count(data)
            etag = self._store.put(self.key, data, content_type=_CONTENT_TYPE)
        else:
            if self._carry:
                self._send()
            etag = self._store.complete_multipart(self.key, self._upload_id, self._etags)
        return StreamedObject(self.key, etag, self._hash.hexdigest(), self._size_bytes)

    def abort(self) -> None:
        """Give an unfinished upload up."""
        if self._upload_id is not None:
            self._store.abort_multipart(self.key, self._upload_id)

    def _send(self) -> None:
        if self._upload_id is None:
            self._upload_id = self._store.start_multipart(self.key, content_type=_CONTENT_TYPE)
            self._on_upload(self.key, self._upload_id)
        data = bytes(self._carry)
        self._etags.append(self._store.upload_part(self.key, self._upload_id, len(self._etags) + 1, data))
        self._count(data)
        self._carry.clear()

    def _count(self, data: bytes) -> None:
        self._hash.update(data)
        self._size_bytes += len(data)
