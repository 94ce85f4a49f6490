"""A stream's object is its rows, exactly, whether it was put at once or uploaded in parts."""

from __future__ import annotations

import hashlib

import pytest

from batchsvc.batches.window_spool import Rows
from tests.workers.conftest import World
from workers import stream
from workers.stream import ResultStream


@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 0), (1, 10), (3, 4 * 1024 * 1024), (11, 3 * 1024 * 1024)])
def test_a_stream_is_one_put_or_a_multipart_upload(sqlite_world: World, rows: int, row_bytes: int) -> None:
    uploads: list[str] = []
    written = ResultStream(sqlite_world.store, "out/x", on_upload=lambda key, _: uploads.append(key))
    whole = b"".join(bytes([65 + n]) * row_bytes + b"\n" for n in range(rows))
    for n in range(rows):
        written.append(Rows(bytes([65 + n]) * row_bytes + b"\n", 1))
    done = written.finish()
    written.close()
    if rows == 0:
        assert done is None and sqlite_world.store.head("out/x") is None
        return
    assert done is not None
    assert sqlite_world.store.get("out/x") == whole
    assert (done.size_bytes, done.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert bool(uploads) == (len(whole) >= stream.PART_BYTES)
