"""What kind of file some bytes are: told by how they begin, never by a name. Pure."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from enum import StrEnum

HEAD_BYTES = 64 * 1024
"""As many bytes of a file as it takes to tell."""
BATCH_COLUMNS = ("custom_id", "body")
"""What a table in batch form has."""
MAX_COLUMNS = 10_000
SUFFIXES = (".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".gz", ".zst")
"""What the name of an upload may end in; what is in it is told by its bytes."""
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_SKIPPABLE = b"\x2a\x4d\x18"  # after one byte 0x50 to 0x5f: a zstd frame of somebody's own
_DELIMITERS = ",;\t"
_FOREIGN = {
    b"PK\x03\x04": "a zip archive or an Excel workbook: unpack it, or export it as CSV",
    b"\xd0\xcf\x11\xe0": "an old Excel workbook: export it as CSV",
    b"ARROW1": "an Arrow file: write it as Parquet",
    b"\xff\xfe": "UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "UTF-16 text: save it as UTF-8",
    b"BZh": "packed with bzip2: use gzip or zstd",
    b"\xfd7zXZ": "packed with xz: use gzip or zstd",
}


class Packing(StrEnum):
    """How a file is compressed."""

    GZIP = "gzip"
    ZSTD = "zstd"


class Kind(StrEnum):
    """What an unpacked file holds."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


def packing_of(head: bytes) -> Packing | None:
    """The compression of a file that begins so; None: it isn't compressed."""
    if head.startswith(b"\x1f\x8b"):
        return Packing.GZIP
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == _SKIPPABLE and 0x50 <= head[0] <= 0x5F):
        return Packing.ZSTD
    return None


def kind_of(head: bytes, *, otherwise: Kind) -> Kind:
    """The kind of an unpacked file that begins so. `otherwise`: of text that is neither an object nor a CSV file in
    batch form."""
    if head.startswith(b"PAR1"):
        return Kind.PARQUET
    text = head.removeprefix(_BOM).lstrip(_BLANK)
    if text.startswith(b"{"):
        return Kind.JSONL
    return Kind.CSV if set(BATCH_COLUMNS) <= set(_header(text)) else otherwise


def is_plain(head: bytes) -> bool:
    """Whether a file in batch form can be read as it is: JSONL, not compressed, and nothing that nobody here reads."""
    if packing_of(head) is not None or why_foreign(head) is not None:
        return False
    return kind_of(head, otherwise=Kind.JSONL) is Kind.JSONL


def why_foreign(head: bytes) -> str | None:
    """What a file is that nobody here reads; None: nothing speaks against it."""
    return next((says for magic, says in _FOREIGN.items() if head.startswith(magic)), None)


def delimiter_of(header: str) -> str:
    """The delimiter of a CSV file with this first line: comma, semicolon or tab, whichever it has most often."""
    return max(_DELIMITERS, key=header.count)


def twice_named(columns: Sequence[str]) -> str | None:
    """The first name that more than one column has."""
    seen: set[str] = set()
    for name in columns:
        if name in seen:
            return name
        seen.add(name)
    return None


def _header(text: bytes) -> list[str]:
    """The columns that the first line of a CSV file names."""
    line = text.split(b"\n", 1)[0].decode("utf-8", "replace")
    try:
        return next(csv.reader([line], delimiter=delimiter_of(line)), [])
    except csv.Error:
        return []
