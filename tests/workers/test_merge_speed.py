"""How fast results are put together: 200 MB of parts, in several windows. It prints MB/s and asserts no speed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from batchsvc.batches import unit_queries
from batchsvc.batches.lifecycle import Status
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish, put_part
from tests.workers.test_finalize import commit, finalizer

WINDOWS, LINES, ROW_BYTES = 4, 25_000, 2_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("status", [Status.COMPLETED, Status.CANCELLED])
def test_200_mb_are_merged(sqlite_world: World, status: Status) -> None:
    """Cancelled: half the lines never ran and become error lines."""
    world = sqlite_world
    batch_id = world.add_batch(num_lines=LINES, unit_lines=500, windows=WINDOWS)
    num_units = WINDOWS * LINES // 500 // (1 if status == Status.COMPLETED else 2)
    for _ in range(num_units):
        (unit,) = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 3000, 1))
        lines = [
            replace(line, line=replace(line.line, row=line.line.row[:-1] + b',"pad":"' + _words(line.bit) + b'"}'))
            for line in finish(world, unit)
        ]
        commit(world, unit, put_part(world, unit, lines))
    if status == Status.CANCELLED:
        world.set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=1)
    began = time.monotonic()
    assert finalizer(world).finalize(batch_id)
    took_s = time.monotonic() - began
    world.judge(batch_id, status)
    sizes = [world.store.head(key) for key, _ in world.store.list_keys(f"batch/{batch_id}/out/")]
    merged_mb = sum(info.size_bytes for info in sizes if info) / 1e6
    print(f"\n{status}: {merged_mb:.0f} MB in {took_s:.2f} s: {merged_mb / took_s:.0f} MB/s")


def _words(number: int) -> bytes:
    return b" ".join(b"%d" % (number * 7919 + i * 104729) for i in range(ROW_BYTES // 9))[:ROW_BYTES]
