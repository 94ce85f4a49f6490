"""A multipart form whose one file goes to the store as it comes: no spooling, bounded memory, SHA-256 on the way.

`Form` is the parser, fed with pieces of the body; `StoreSink` takes the file's bytes and uploads a part whenever it
holds one. A file that is smaller than a part is one PUT.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool

from batchsvc.errors import InvalidRequestError, ServiceError, TooLargeError
from batchsvc.store.s3 import ObjectStore

T = TypeVar("T")

_PART_BYTES = 8 * 1024 * 1024
_MAX_PARTS = 9_000  # S3 takes 10,000
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4_096
_MAX_FRAME_BYTES = 1_048_576  # what a form may add to its file: fields, headers, boundaries


@dataclass(frozen=True, slots=True)
class Field:
    """A form field, whole."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class FileStart:
    """A file part begins; its bytes follow."""

    name: str
    filename: str


@dataclass(frozen=True, slots=True)
class FileData:
    """The next bytes of the file."""

    data: bytes


Event = Field | FileStart | FileData


class Form:
    """Turns pieces of a multipart body into events. Raises InvalidRequestError for a body that is no such form."""

    def __init__(self, content_type: str | None) -> None:
        kind, options = parse_options_header(content_type or "")
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequestError(
                "Send a file as multipart/form-data, as the official client does.", code="invalid_body"
            )
        self.is_complete = False
        self._events: list[Event] = []
        self._header_name, self._header_value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._is_file = False
        self._name, self._value = "", b""
        self._num_fields = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_val,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise InvalidRequestError("The form's boundary can't be used.", code="invalid_body") from error

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The events that this piece of the body brings."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidRequestError("The request's body is no valid multipart form.", code="invalid_body") from error
        events, self._events = self._events, []
        yield from events

    def _part_begin(self) -> None:
        self._headers, self._value = {}, b""
        self._num_fields += 1
        if self._num_fields > _MAX_FIELDS:
            raise InvalidRequestError(f"The form has more than {_MAX_FIELDS} fields.", code="invalid_body")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _header_val(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value
        self._header_name, self._header_value = b"", b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._is_file = filename is not None
        if filename is not None:
            self._events.append(FileStart(self._name, filename.decode("utf-8", "replace")))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._events.append(FileData(data[start:end]))
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"The form's field '{self._name[:64]}' is over {_MAX_FIELD_BYTES} bytes; a file needs a filename.",
                code="invalid_body",
            )

    def _part_end(self) -> None:
        if not self._is_file:
            self._events.append(Field(self._name, self._value.decode("utf-8", "replace")))

    def _end(self) -> None:
        self.is_complete = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What a sink has put into the store."""

    etag: str
    sha256: str
    size_bytes: int


class StoreSink:
    """Writes one object of unknown length. Holds at most a part; end it with `finish` or `abandon`.

    `what` and `param` are the object's names in the error when it gets too large.
    """

    def __init__(self, store: ObjectStore, key: str, max_bytes: int, what: str = "file", param: str = "file") -> None:
        self._store, self._key, self._max_bytes = store, key, max_bytes
        self._what, self._param = what, param
        self._part_bytes = max(_PART_BYTES, -(-max_bytes // _MAX_PARTS))
        self._buffer = bytearray()
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0
        self._upload_id: str | None = None
        self._etags: list[str] = []

    async def write(self, data: bytes) -> None:
        """Take bytes; uploads a part when one is full. Raises TooLargeError over the limit."""
        self._size_bytes += len(data)
        if self._size_bytes > self._max_bytes:
            raise _too_large(self._max_bytes, self._what, self._param)
        self._buffer += data
        if len(self._buffer) >= self._part_bytes:
            await run_in_threadpool(self._send_part)

    async def finish(self) -> Stored:
        """Store what is left and make the object visible."""
        etag = await run_in_threadpool(self._finish)
        return Stored(etag=etag, sha256=self._sha256.hexdigest(), size_bytes=self._size_bytes)

    async def abandon(self) -> None:
        """Leave nothing behind, as far as the store answers."""
        if self._upload_id is not None:
            await run_in_threadpool(_quietly, lambda: self._store.abort_multipart(self._key, self._upload_id or ""))

    def _send_part(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        self._sha256.update(data)
        if self._upload_id is None:
            self._upload_id = self._store.start_multipart(self._key)
        self._etags.append(self._store.upload_part(self._key, self._upload_id, len(self._etags) + 1, data))

    def _finish(self) -> str:
        if self._upload_id is None:
            data = bytes(self._buffer)
            self._sha256.update(data)
            return self._store.put(self._key, data)
        if self._buffer:
            self._send_part()
        return self._store.complete_multipart(self._key, self._upload_id, self._etags)


def sha256_of(data: bytes) -> str:
    """What names the content of an object."""
    return hashlib.sha256(data).hexdigest()


def check_length(header: str | None, max_bytes: int, what: str = "file", param: str = "file") -> None:
    """Refuse a body that says itself that its file is too large, before a byte of it is read."""
    if header and header.isdigit() and int(header) > max_bytes + _MAX_FRAME_BYTES:
        raise _too_large(max_bytes, what, param)


def least_bytes(header: str | None) -> int:
    """The least that the file of a body of this Content-Length has; 0 of one that doesn't say its length."""
    return max(0, int(header) - _MAX_FRAME_BYTES) if header and header.isdigit() else 0


def check_size(size_bytes: int, max_bytes: int, what: str = "file", param: str = "file") -> None:
    """Refuse a file whose size is known and over the limit."""
    if size_bytes > max_bytes:
        raise _too_large(max_bytes, what, param)


def _too_large(max_bytes: int, what: str, param: str) -> TooLargeError:
    return TooLargeError(
        f"The {what} is over {max_bytes} bytes, the most that one {what} may have: split it.",
        code=f"{what}_too_large",
        param=param,
    )


def _quietly(work: Callable[[], T]) -> T | None:
    try:
        return work()
    except ServiceError:
        return None  # the store's own lifecycle removes what we can't
