"""When a stopped batch is sealed: as soon as its workers have let go, and at the latest after the grace."""

from __future__ import annotations

import threading

import pytest

from batchsvc.batches import finalize_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.clock import now_ms
from tests.dispatchers import NullDispatcher
from tests.workers.conftest import DIGEST, World
from workers.finalize import Finalizer
from workers.reaper import Reaper


def claim(world: World) -> None:
    assert world.db.run(lambda session: unit_queries.claim(session, DIGEST, "gone", 600, 1))


def is_next_seal_in(world: World, most_s: float) -> bool:
    """Whether time alone seals a batch within `most_s`, and not much sooner."""
    with world.db.reading() as session:
        found = finalize_queries.next_seal_ms(session)
    return found is not None and (most_s - 9) * 1000 < found <= most_s * 1000 + 1


def due(world: World) -> list[str]:
    with world.db.reading() as session:
        return finalize_queries.due(session)


def test_a_stopped_batch_is_due_when_its_leases_are_gone_or_its_grace_is_over(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=2, expires_in_s=500)
    assert due(world) == [] and is_next_seal_in(world, 500)
    claim(world)
    world.set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=now_ms())
    assert due(world) == [] and is_next_seal_in(world, 10)
    world.set_batch(batch_id, cancelling_ms=now_ms() - 10_100)
    assert due(world) == [batch_id] and not is_next_seal_in(world, 10)
    world.set_batch(batch_id, cancelling_ms=now_ms())
    world.set_units(batch_id, state="ready")
    assert due(world) == [batch_id], "nobody holds anything of it"
    world.set_batch(batch_id, status=Status.IN_PROGRESS, expires_ms=now_ms() - 1)
    claim_by_force(world, batch_id)
    assert due(world) == [] and is_next_seal_in(world, 10)


def claim_by_force(world: World, batch_id: str) -> None:
    world.set_units(batch_id, state="leased", owner="gone", lease_ms=now_ms() + 600_000)


@pytest.mark.parametrize(("status", "ended"), [("cancelling", "cancelled"), ("in_progress", "expired")])
def test_the_reaper_wakes_for_a_seal_and_gives_the_reservation_back(
    world: World, monkeypatch: pytest.MonkeyPatch, status: str, ended: str
) -> None:
    """A dead worker holds a lease of ten minutes, the reaper's own period is a minute: the grace alone decides."""
    monkeypatch.setattr(finalize_queries, "STOP_GRACE_MS", 1_500)
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    claim(world)
    stopped = {"cancelling_ms": now_ms()} if status == "cancelling" else {"expires_ms": now_ms() + 100}
    world.set_batch(batch_id, status=status, **stopped)
    finalizer, is_over = Finalizer(world.settings, world.db, world.store, "fin"), threading.Event()

    def finalize(due_id: str) -> None:
        if finalizer.finalize(due_id):
            is_over.set()

    settings = world.settings.model_copy(update={"reaper_s": 60.0})
    reaper = Reaper(
        settings, world.db, world.store, NullDispatcher(), plan=lambda _: None, finalize=finalize, quote=lambda _: None
    )
    reaper.start()
    try:
        assert is_over.wait(45), "long before the reaper's period is over"
    finally:
        reaper.stop()
    world.judge(batch_id, Status(ended))
