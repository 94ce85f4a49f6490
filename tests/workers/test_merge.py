"""Merging: whatever the order and the bucket, rows come out in line order; a stream's object is its rows, exactly."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches.part_file import PartLine
from tests.workers.conftest import World
from workers import stream
from workers.merge import WindowSpool
from workers.stream import ResultStream

ROWS = st.dictionaries(st.integers(1, 10**9), st.tuples(st.booleans(), st.binary(max_size=60)), max_size=40)


@given(rows=ROWS, bucket=st.integers(1, 200), parts=st.integers(1, 5), data=st.data())
def test_lines_come_out_in_order_whatever_the_bucket(
    rows: dict[int, tuple[bool, bytes]], bucket: int, parts: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(sorted(rows)))
    with WindowSpool(bucket) as spool:
        for part in range(parts):
            spool.add(
                PartLine(line_no=n, is_ok=rows[n][0], row=rows[n][1].replace(b"\n", b"")) for n in shuffled[part::parts]
            )
        assert spool.line_nos() == set(rows)
        merged = list(spool.merged())
    assert [(line.line_no, line.is_ok, line.row) for line in merged] == [
        (n, rows[n][0], rows[n][1].replace(b"\n", b"")) for n in sorted(rows)
    ]


def test_a_line_with_two_results_is_refused(tmp_path: Path) -> None:
    with WindowSpool(100, tmp_path) as spool:
        spool.add([PartLine(line_no=3, is_ok=True, row=b"a"), PartLine(line_no=3, is_ok=False, row=b"b")])
        with pytest.raises(ValueError, match="two results"):
            spool.line_nos()
    assert not list(tmp_path.iterdir()), "nothing is left on the disk"


@pytest.mark.parametrize(("rows", "row_bytes"), [(0, 0), (1, 10), (3, 4 * 1024 * 1024), (11, 3 * 1024 * 1024)])
def test_a_stream_is_one_put_or_a_multipart_upload(sqlite_world: World, rows: int, row_bytes: int) -> None:
    uploads: list[str] = []
    written = ResultStream(sqlite_world.store, "out/x", on_upload=lambda key, _: uploads.append(key))
    whole = b"".join(bytes([65 + n]) * row_bytes + b"\n" for n in range(rows))
    for n in range(rows):
        written.append(bytes([65 + n]) * row_bytes)
    done = written.finish()
    if rows == 0:
        assert done is None and sqlite_world.store.head("out/x") is None
        return
    assert done is not None
    assert sqlite_world.store.get("out/x") == whole
    assert (done.size_bytes, done.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert bool(uploads) == (len(whole) >= stream.PART_BYTES)
