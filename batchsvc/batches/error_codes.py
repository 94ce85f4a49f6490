"""Counts the codes by which lines of a batch have failed, for an operator who must not read the lines themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import orjson

from batchsvc.batches import part_file, result_queries
from batchsvc.batches.damage import DamagedObjectError, verified
from batchsvc.batches.tables import Batch
from batchsvc.db.session import Database
from batchsvc.errors import NotFoundError, UnavailableError
from batchsvc.files import service as files
from batchsvc.store.s3 import ObjectStore

_MOST_LINES, _MOST_PARTS = 10_000, 100  # enough to see what is wrong, and soon read


def counted(db: Database, store: ObjectStore, batch_id: str) -> dict[str, int]:
    """Error lines by code, the most frequent first: of the first 10,000 in the error file, or while the batch runs in
    its newest 100 parts that have some. Empty where there are none, or where they were deleted or can't be read now."""
    with db.reading() as session:
        batch = session.get(Batch, batch_id)
        if batch is None or batch.deleted_ms is not None:
            return {}
        file = files.find_stored(session, batch.project_id, batch.error_file_id) if batch.error_file_id else None
        parts = [] if file else result_queries.newest_parts_with_errors(session, batch_id, _MOST_PARTS)
    rows = _of_parts(store, parts) if file is None else _of_file(store, file.s3_key)
    codes: Counter[str] = Counter()
    with suppress(NotFoundError, UnavailableError, DamagedObjectError):  # then what was read until there is told
        codes.update(_code(orjson.loads(row)) for row in islice(rows, _MOST_LINES))
    return dict(codes.most_common())


def _of_parts(store: ObjectStore, parts: list[tuple[str, str]]) -> Iterator[bytes]:
    for key, sha256 in parts:
        data = verified(store.get, key, sha256)
        yield from (line.row for line in part_file.decode(data) if not line.is_ok)


def _of_file(store: ObjectStore, key: str) -> Iterator[bytes]:
    rest = b""
    for chunk in store.stream(key):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from filter(None, lines)


def _code(row: dict[str, Any]) -> str:
    error = row["error"] or row["response"]["body"]["error"]
    return str(error["code"])
