"""Stores an object whose bytes come in pieces, in bounded memory: one call for a small one, else an upload in parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from batchsvc.errors import ServiceError
from batchsvc.store.s3 import Bucket

_PART_BYTES = 8 * 1024 * 1024  # S3 takes 10,000 parts: 80 GB
_PLAIN_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What was stored."""

    etag: str
    sha256: str
    size_bytes: int


def put_pieces(
    store: Bucket,
    key: str,
    pieces: Iterable[bytes],
    *,
    writer: str | None = None,
    content_type: str = _PLAIN_TYPE,
    keep: Callable[[], None] = lambda: None,
    on_upload: Callable[[str], None] = lambda _upload_id: None,
) -> StoredObject:
    """Store the pieces under a key; with `writer`, once (see s3.py). `keep` is called often, and raises when the
    caller must stop; `on_upload` gets the id of an upload in parts before its first part is sent."""
    buffer, etags = bytearray(), list[str]()
    sha256, size_bytes = hashlib.sha256(), 0
    upload_id: str | None = None

    def send(upload: str) -> None:
        etags.append(store.upload_part(key, upload, len(etags) + 1, bytes(buffer)))
        buffer.clear()

    try:
        for piece in pieces:
            keep()
            buffer += piece
            sha256.update(piece)
            size_bytes += len(piece)
            if len(buffer) >= _PART_BYTES:
                if upload_id is None:
                    upload_id = store.start_multipart(key, content_type=content_type, writer=writer)
                    on_upload(upload_id)
                send(upload_id)
        if upload_id is None:
            etag = store.put(key, bytes(buffer), content_type=content_type, writer=writer)
        else:
            if buffer:
                send(upload_id)
            keep()
            etag = store.complete_multipart(key, upload_id, etags, writer=writer, size_bytes=size_bytes)
    except BaseException:
        if upload_id is not None:
            with suppress(ServiceError):  # why it ended is what counts
                store.abort_multipart(key, upload_id)
        raise
    return StoredObject(etag=etag, sha256=sha256.hexdigest(), size_bytes=size_bytes)
