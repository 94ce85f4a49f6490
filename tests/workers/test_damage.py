"""Damaged objects: found by their sha256, taken back with their money, run or rebuilt again, and never silent."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select
from structlog.testing import capture_logs

from batchsvc.batches import tally_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Part, Window
from batchsvc.billing.tables import LedgerTransaction, UsageRow
from batchsvc.store.s3 import ObjectStore
from tests.workers.conftest import World
from tests.workers.test_finalize import KilledError, finalizer, run_units


def damage(world: World, part: Part, how: str, other: Part) -> None:
    if how == "gone":
        world.store.delete([part.s3_key])
        return
    data = world.store.get((other if how == "foreign" else part).s3_key)
    world.store.put(part.s3_key, data if how == "foreign" else data[:-1] + bytes([data[-1] ^ 1]))


def money(world: World, batch_id: str) -> dict[str, int]:
    with world.db.reading() as session:
        kinds = select(LedgerTransaction.kind, func.count()).where(LedgerTransaction.batch_id == batch_id)
        return {row[0]: row[1] for row in session.execute(kinds.group_by(LedgerTransaction.kind))}


@pytest.mark.parametrize("how", ["bits", "gone", "foreign"])
def test_lines_of_a_damaged_part_are_run_again_and_billed_once(world: World, how: str) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=4, windows=2)
    run_units(world)
    before, (part, other, *_) = world.batch(batch_id), world.parts(batch_id)
    damage(world, part, how, other)
    with capture_logs() as logs:
        assert finalizer(world).finalize(batch_id) is False
    assert [entry["part"] for entry in logs if entry["event"] == "part.damaged"] == [part.id], "never silent"
    batch = world.batch(batch_id)
    assert (batch.status, batch.why) == (Status.FINALIZING, Status.COMPLETED)
    assert (batch.completed, batch.cost_nanos) == (
        before.completed - part.lines_ok,
        before.cost_nanos - part.cost_nanos,
    )
    (unit,) = [unit for unit in world.units(batch_id) if unit.state != "done"]
    assert (unit.id, unit.state, unit.epoch, unit.num_done) == (part.unit_id, "ready", 2, 4 - part.lines_ok)
    assert int.from_bytes(unit.done_bitmap, "little") & int.from_bytes(part.bitmap or b"", "little") == 0
    assert world.db.run(tally_queries.all_of)["parts_damaged"].num == 1
    assert finalizer(world).finalize(batch_id) is False, "its lines aren't there yet"
    run_units(world)
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, Status.COMPLETED)
    assert world.batch(batch_id).cost_nanos == before.cost_nanos, "the same lines cost the same"
    counted = len(world.parts(batch_id))
    assert money(world, batch_id) == {"reserve": 1, "part": counted, "void": 1, "release": 1}
    with world.db.reading() as session:
        assert session.scalar(select(UsageRow.requests).where(UsageRow.part_id == f"void:{part.id}")) == -part.lines_ok


def test_one_attempt_finds_all_damage_and_a_killed_one_loses_none(sqlite_world: World, monkeypatch: Any) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=8, unit_lines=2, windows=2)
    run_units(world)
    parts = world.parts(batch_id)
    for part in parts[::3]:
        damage(world, part, "gone", part)
    with monkeypatch.context() as patch:

        def killed(name: str) -> None:
            if name == "part.voided":
                raise KilledError

        patch.setattr("batchsvc.failpoints.reach", killed)
        with pytest.raises(KilledError):
            finalizer(world).finalize(batch_id)
    assert sum(part.is_void for part in world.parts(batch_id)) == 1
    run_units(world)
    world.set_batch(batch_id, fin_lease_ms=0)
    assert finalizer(world).finalize(batch_id) is False
    assert {part.id for part in world.parts(batch_id) if part.is_void} == {part.id for part in parts[::3]}
    run_units(world)
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, Status.COMPLETED)


@pytest.mark.parametrize("why", [Status.CANCELLED, Status.EXPIRED])
def test_of_a_stopped_batch_nothing_runs_again(world: World, why: Status) -> None:
    batch_id = world.add_batch(num_lines=12, unit_lines=4)
    run_units(world, most_units=2)
    stop: dict[str, Any] = {"status": Status.CANCELLING, "cancelling_ms": 2**45}
    world.set_batch(batch_id, **(stop if why == Status.CANCELLED else {"expires_ms": 1}))
    damage(world, world.parts(batch_id)[0], "gone", world.parts(batch_id)[0])
    assert finalizer(world).finalize(batch_id) is False
    assert {unit.state for unit in world.units(batch_id)} == {"done", "sealed"}
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, why)
    assert world.batch(batch_id).completed == 8 - 2


def test_a_passing_fault_of_the_store_is_no_damage(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    run_units(world)
    reads: list[str] = []

    class Flaky(ObjectStore):
        def get(self, key: str) -> bytes:
            reads.append(key)
            return super().get(key)[: -1 if reads.count(key) < 3 else None]

    assert finalizer(world, Flaky(world.settings)).finalize(batch_id) is True
    world.judge(batch_id, Status.COMPLETED)
    assert not any(part.is_void for part in world.parts(batch_id))


def test_lines_that_nobody_runs_again_expire_at_last(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    run_units(world)
    part = world.parts(batch_id)[0]
    damage(world, part, "gone", part)
    assert finalizer(world).finalize(batch_id) is False
    world.set_batch(batch_id, expires_ms=1)
    assert finalizer(world).finalize(batch_id) is False, "the deadline doesn't cut what is run again at once"
    world.set_batch(batch_id, finalizing_ms=1)
    assert finalizer(world).finalize(batch_id) is True
    world.judge(batch_id, Status.EXPIRED)
    assert world.batch(batch_id).failed == part.lines_ok


def test_a_worker_runs_lines_again_while_its_batch_is_finalizing(world: World) -> None:
    batch_id = world.add_batch(num_lines=2, unit_lines=2)
    run_units(world)
    for part in world.parts(batch_id):
        damage(world, part, "gone", part)
    finalizer(world).finalize(batch_id)
    world.set_batch(batch_id, expires_ms=1)
    run_units(world, lines=1)
    assert world.units(batch_id)[0].num_done == 1
    with world.db.transaction() as session:
        (unit,) = unit_queries.claim(session, world.units(batch_id)[0].model_digest, "w", 30, 1)
        assert [unit.is_stopping for unit in unit_queries.renew(session, "w", 30, [unit.id])] == [False]


def test_numbers_of_lines_that_are_lost_are_asked_for(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    world.set_batch(batch_id, expires_ms=1)
    with world.db.transaction() as session:
        window = session.get_one(Window, (batch_id, 0))
        window.line_nos_sha256 = "0" * 64
    assert finalizer(world).finalize(batch_id) is False
    with world.db.reading() as session:
        assert session.get_one(Window, (batch_id, 0)).is_damaged
    assert finalizer(world).finalize(batch_id) is False, "the planner has to rebuild it first"
