"""How many units a second four processes claim: prints the figure (`pytest -m slow -s`).

What is asserted is that no unit is claimed twice and none is left. Speed is for whoever reads the output.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from sqlalchemy import func, select

from batchsvc.batches.tables import Unit
from tests.workers.conftest import DIGEST, World

PROCESSES, PROJECTS, BATCHES, UNITS = 4, 3, 2, 500
CLAIMER = """
import sys
from sqlalchemy import update
from batchsvc.batches import unit_queries
from batchsvc.batches.tables import Unit
from batchsvc.db.session import Database
url, digest, owner, limit = sys.argv[1:]
db, got, held = Database(url), 0, []
db.run(lambda session: None)
print(flush=True)
sys.stdin.readline()
while claimed := db.run(lambda session: unit_queries.claim(session, digest, owner, 3600, int(limit))):
    got += len(claimed)
    held += [unit.id for unit in claimed]
    if len(held) >= 8:  # what a worker holds at once
        with db.transaction() as session:
            session.execute(update(Unit).where(Unit.id.in_(held)).values(state="done"))
        held = []
print(got)
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 4])
def test_four_processes_share_all_units(world: World, limit: int) -> None:
    for number in range(PROJECTS * BATCHES):
        batch_id = world.add_batch(num_lines=1, unit_lines=1, project=f"p{number % PROJECTS}")
        with world.db.transaction() as session:
            model = session.scalars(select(Unit).where(Unit.batch_id == batch_id)).one()
            session.add_all(
                Unit(
                    id=f"{model.id}{no}",
                    batch_id=batch_id,
                    project_id=model.project_id,
                    model_digest=DIGEST,
                    window_no=0,
                    no=no,
                    s3_key=model.s3_key,
                    sha256=model.sha256,
                    num_lines=512,
                    est_tokens=500_000,
                    state="ready",
                    done_bitmap=bytes(64),
                )
                for no in range(1, UNITS)
            )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMER, world.settings.database_url, DIGEST, f"w{number}", str(limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "\n"
    begun = time.monotonic()
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    got = [int(process.communicate(timeout=240)[0]) for process in started]
    took_s = time.monotonic() - begun
    total = PROJECTS * BATCHES * UNITS
    dialect = "SQLite" if world.db.is_sqlite else "PostgreSQL"
    print(f"\n{dialect}, {limit} a claim: {total / took_s:.0f} units/s by {PROCESSES} processes, {got} each")
    assert sum(got) == total
    with world.db.reading() as session:
        assert session.scalar(select(func.max(Unit.epoch))) == 1
        assert session.scalar(select(func.count(Unit.id)).where(Unit.state == "ready")) == 0
