"""The lease keeper: what it calls held, lost and stopping."""

from __future__ import annotations

import time

import pytest

from batchsvc.batches import unit_queries, worker_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Worker
from batchsvc.batches.unit_queries import Claim
from batchsvc.clock import monotonic_s
from tests.workers.conftest import DIGEST, World
from workers.breaker import Breaker
from workers.lease import Beat, LeaseKeeper


class Kept:
    """A keeper of two claimed units that notes what it reports."""

    def __init__(self, world: World, lease_s: float = 30) -> None:
        self.lost: list[Claim] = []
        self.stopped: list[str] = []
        self.crashed: list[Exception] = []
        self.breaker = Breaker()
        self.batch_id = world.add_batch(num_lines=4, unit_lines=2)
        world.db.run(lambda session: worker_queries.register(session, "me", DIGEST))
        self.keeper = LeaseKeeper(
            world.db,
            "me",
            digest=DIGEST,
            lease_s=lease_s,
            renew_s=0.05,
            beat=lambda: Beat(False, {"running": 1}),
            breaker=self.breaker,
            on_lost=self.lost.extend,
            on_stop=self.stopped.extend,
            on_crash=self.crashed.append,
        )
        began = monotonic_s()
        self.units = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "me", lease_s, 2))
        for unit in self.units:
            self.keeper.hold(unit.id, unit.epoch, began)


def test_what_is_renewed_is_held_and_what_was_reaped_is_lost_once(world: World) -> None:
    kept = Kept(world)
    first, second = kept.units
    kept.keeper.tick()
    assert not kept.lost and kept.keeper.is_held(first.claim) and kept.keeper.is_held(second.claim)
    with world.db.transaction() as session:
        assert unit_queries.release(session, first.id, first.epoch)
    kept.keeper.tick()
    kept.keeper.tick()
    assert kept.lost == [first.claim]
    assert not kept.keeper.is_held(first.claim) and kept.keeper.is_held(second.claim)


def test_a_unit_that_was_claimed_anew_is_not_ours(world: World) -> None:
    kept = Kept(world)
    first = kept.units[0]
    with world.db.transaction() as session:
        unit_queries.release(session, first.id, first.epoch)
    world.db.run(lambda session: unit_queries.claim(session, DIGEST, "me", 30, 1))  # same owner, next epoch
    kept.keeper.tick()
    assert kept.lost == [first.claim]


def test_the_loss_of_a_claim_is_not_that_of_the_next_one(world: World) -> None:
    kept = Kept(world)
    first = kept.units[0]
    with world.db.transaction() as session:
        unit_queries.release(session, first.id, first.epoch)
    (again,) = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "me", 30, 1))
    assert again.id == first.id
    kept.keeper.hold(again.id, again.epoch, monotonic_s())
    kept.keeper.forget([first.claim])  # told late, by whoever noticed last
    kept.keeper.tick()
    assert kept.keeper.is_held(again.claim) and not kept.lost


def test_units_of_a_stopped_batch_are_told(world: World) -> None:
    kept = Kept(world)
    world.set_batch(kept.batch_id, status=Status.CANCELLING)
    kept.keeper.tick()
    assert sorted(kept.stopped) == sorted(unit.id for unit in kept.units) and not kept.lost


def test_without_renewal_it_fences_itself_before_the_lease_is_over(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(sqlite_world, lease_s=0.6)
    monkeypatch.setattr(kept.keeper, "_renew", lambda: None)
    assert kept.keeper.is_held(kept.units[0].claim)
    time.sleep(0.6 * 5 / 6)
    assert not kept.keeper.is_held(kept.units[0].claim), "no thread has to run for that"
    kept.keeper.tick()
    assert sorted(kept.lost) == sorted(unit.claim for unit in kept.units)


def test_a_heartbeat_carries_the_worker(sqlite_world: World) -> None:
    kept = Kept(sqlite_world)
    kept.keeper.start()
    kept.keeper.stop()
    sqlite_world.db.run(lambda session: worker_queries.retire(session, "me"))  # taken for dead
    kept.keeper.tick()
    with sqlite_world.db.reading() as session:
        row = session.get_one(Worker, "me")
    assert row.stats == {"running": 1} and row.beat_ms > 0 and not kept.crashed
