"""The plain form of an uploaded file: the file itself if it is JSONL, else an object beside it that is made once.

Planning goes through a file window by window and may be killed between any two, so it needs offsets to begin at, which
a compressed stream or a table doesn't have. So such a file is decoded once, in a limited process, into lines in our own
bucket. The object names the version of the file that it was made of (in its writer), is made whole or not at all, and
goes with the file. Whoever comes second finds it; whoever was killed leaves an upload that the audit removes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from batchsvc.files.formats import HEAD_BYTES, is_plain
from batchsvc.files.limited import Decoding, Form, Source
from batchsvc.files.lines import Record, jsonl_records
from batchsvc.files.rows import row_records
from batchsvc.files.unpack import DecodeLimits
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.pieces import put_pieces
from batchsvc.store.s3 import ObjectStore

_FORMS: tuple[Form, ...] = ("lines", "rows")


@dataclass(frozen=True, slots=True)
class PlainFile:
    """An object of lines, pinned by its ETag: those that the user wrote, or those of files/rows.py."""

    s3_key: str
    etag: str
    form: Form

    def records(
        self, chunks: Iterator[bytes], *, endpoint: str, max_line_bytes: int, first_line: int, offset: int
    ) -> Iterator[Record]:
        """The records of the lines from `first_line` on, which is where the chunks begin."""
        if self.form == "lines":
            return jsonl_records(chunks, max_line_bytes=max_line_bytes, first_line=first_line, offset=offset)
        return row_records(
            chunks, endpoint=endpoint, max_line_bytes=max_line_bytes, first_row=first_line, offset=offset
        )


def limits_of(settings: Settings) -> DecodeLimits:
    """What decoding an upload may cost."""
    return DecodeLimits(
        max_line_bytes=settings.max_line_bytes,
        max_decoded_bytes=settings.max_input_bytes,
        max_expansion=settings.max_expansion,
        max_rows=settings.max_lines,
    )


def plain_file(
    store: ObjectStore, s3_key: str, etag: str, size_bytes: int, limits: DecodeLimits, keep: Callable[[], None]
) -> PlainFile:
    """The plain form of a file; made now, if it has none. `keep` is called often, and raises when the caller must stop.

    Raises UnreadableFileError for a file that can't be decoded, and what the store raises for one that has changed.
    """

    def fetch(start: int, end: int) -> bytes:
        keep()
        return b"".join(store.stream(s3_key, start=start, end=end, etag=etag))

    if is_plain(fetch(0, HEAD_BYTES)):
        return PlainFile(s3_key, etag, "lines")
    key = keys.plain_input(s3_key)
    if info := store.head(key):
        for form in _FORMS:
            if info.writer == _writer(form, etag):
                return PlainFile(key, info.etag, form)
    with Decoding(Source(size_bytes, fetch), limits, is_table=False) as decoding:
        made = put_pieces(store, key, decoding.pieces(), writer=_writer(decoding.form, etag), keep=keep)
    return PlainFile(key, made.etag, decoding.form)


def _writer(form: Form, etag: str) -> str:
    return f"{form}:{etag}"
