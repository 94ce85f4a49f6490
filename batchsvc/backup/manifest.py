"""What a backup says of itself: its manifest, written last, and a line for each object. Pure.

    {"format": 1, "name", "made_by", "created_ms", "revision", "database": {"kind", "files": [...]},
     "objects": {"name", "size_bytes", "sha256", "num", "num_bytes", "num_missing"}, "has_secrets"}

The list of objects is JSONL: {"key", "size_bytes", "sha256", "etag"}; `sha256` is "" for one that the store had lost.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import orjson

from batchsvc.db.snapshot import Kind
from batchsvc.errors import UnavailableError

FORMAT = 1
MANIFEST = "manifest.json"  # there: the backup is whole


class BackupError(UnavailableError):
    """A backup can't be made or used; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a backup, compressed. `table` and `columns`: whose rows it holds, if it is a table's."""

    name: str
    size_bytes: int
    sha256: str
    table: str | None = None
    columns: tuple[str, ...] = ()

    def of_table(self, table: str | None, columns: tuple[str, ...]) -> StoredFile:
        """The same, as rows of a table."""
        return replace(self, table=table, columns=columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedObject:
    """An object of the bucket as it was; without `sha256` it was missing."""

    key: str
    size_bytes: int
    sha256: str
    etag: str

    def line(self) -> bytes:
        return orjson.dumps(asdict(self)) + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> SavedObject:
        """Raises BackupError for a line that isn't one of ours."""
        try:
            return cls(**orjson.loads(line))
        except (ValueError, TypeError) as error:
            raise BackupError("The backup's list of objects can't be read: it is damaged.") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A finished backup. `database` are its files, in the order in which they are restored."""

    name: str
    made_by: str
    created_ms: int
    revision: str
    kind: Kind
    database: tuple[StoredFile, ...]
    objects: StoredFile
    num_objects: int
    num_bytes: int
    num_missing: int
    has_secrets: bool
    format: int = FORMAT

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Raises BackupError for what isn't a manifest, or one of a later format."""
        try:
            found: dict[str, Any] = orjson.loads(data)
            if found["format"] != FORMAT:
                raise BackupError(
                    f"The backup has format {found['format']} and this version reads {FORMAT}: restore it with the "
                    f"version that made it ({found.get('made_by', 'unknown')})."
                )
            files = tuple(_file(one) for one in found["database"])
            return cls(**{**found, "database": files, "objects": _file(found["objects"])})
        except (ValueError, TypeError, KeyError) as error:
            raise BackupError("The backup's manifest can't be read: it is damaged.") from error


def _file(found: dict[str, Any]) -> StoredFile:
    return StoredFile(**{**found, "columns": tuple(found["columns"])})
