"""The whole way of a webhook: a control process finalizes a batch, and its receiver is told, once and signed."""

from __future__ import annotations

import shutil
from pathlib import Path

from batchsvc.batches.lifecycle import Status
from batchsvc.settings import Settings
from batchsvc.webhooks import queries, service
from batchsvc.webhooks.schemas import CreateEndpoint
from tests.receiver import receiving
from tests.workers.conftest import World, open_world
from tests.workers.test_finalize import run_units
from tests.workers.test_processes import environment, process, until


def _states(world: World, endpoint_id: str) -> list[str]:
    with world.db.reading() as session:
        found = queries.deliveries(session, endpoint_id, after=None, limit=9, ascending=True)
        return [delivery.state for delivery, _ in found]


def test_a_control_process_tells_that_a_batch_is_completed(
    sqlite_settings: Settings, migrated_sqlite: Path, tmp_path: Path, tiny: tuple[Path, str]
) -> None:
    """On a migrated database, because a trigger writes the event."""
    shutil.copy(migrated_sqlite, tmp_path / "test.sqlite3")
    opened = open_world(sqlite_settings)
    world = next(opened)
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    project_id = world.batch(batch_id).project_id
    run_units(world)
    changes = {"BATCHSVC_EGRESS_ALLOW": "127.0.0.0/8", "TEST_LOGS": tmp_path}
    with receiving() as receiver, process("control", environment(world.settings, tiny[0], **changes)):
        body = CreateEndpoint(name="n", url=receiver.url, event_types=["batch.completed"])
        endpoint = world.db.run(lambda session: service.create(session, project_id, body))
        (got,) = receiver.wait_for(1, 60)
        event = got.unwrap(endpoint.secret)
        assert (event.type, event.data.id) == ("batch.completed", batch_id)
        assert event.created_at == (world.batch(batch_id).ended_ms or 0) // 1000
        until(lambda: _states(world, endpoint.id) == ["delivered"], "the delivery is written down")
    assert world.batch(batch_id).status == Status.COMPLETED and len(receiver.received) == 1
    opened.close()
