"""Whatever the order of parts and the bucket, rows come out in line order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsvc.batches import part_file
from batchsvc.batches.part_file import PartLine, PartRows
from batchsvc.batches.window_spool import WindowSpool

ROWS = st.dictionaries(st.integers(1, 10**9), st.tuples(st.booleans(), st.binary(max_size=60)), max_size=40)


def part(lines: Sequence[tuple[int, bool, bytes]]) -> PartRows:
    encoded = [PartLine(line_no=n, is_ok=ok, row=b"{" + row.replace(b"\n", b"") + b"}") for n, ok, row in lines]
    return part_file.rows(part_file.encode(encoded))


@given(rows=ROWS, bucket=st.integers(1, 2000), parts=st.integers(1, 5), data=st.data())
def test_rows_come_out_in_order_whatever_the_bucket(
    rows: dict[int, tuple[bool, bytes]], bucket: int, parts: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(sorted(rows)))
    with WindowSpool(bucket) as spool:
        for first in range(parts):
            spool.add(part([(n, *rows[n]) for n in shuffled[first::parts]]))
        assert spool.line_nos().tolist() == sorted(rows)
        merged = list(spool.merged())
    for is_ok, found in ((True, [rows.output for rows in merged]), (False, [rows.error for rows in merged])):
        wanted = [b"{" + rows[n][1].replace(b"\n", b"") + b"}\n" for n in sorted(rows) if rows[n][0] is is_ok]
        assert b"".join(some.data for some in found) == b"".join(wanted)
        assert sum(some.num_lines for some in found) == len(wanted)


def test_a_line_with_two_results_is_refused(tmp_path: Path) -> None:
    with WindowSpool(10, tmp_path) as spool:
        spool.add(part([(3, True, b"a"), (5, True, b"c")]))
        spool.add(part_file.error_rows([3], [b"{b}"]))
        with pytest.raises(ValueError, match="two results"):
            spool.line_nos()
    assert not list(tmp_path.iterdir()), "nothing is left on the disk"
