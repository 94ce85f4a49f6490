"""The fence: claims never overlap, a lost unit can't be written to, a commit counts once."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from batchsvc.batches import unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.db.session import Database
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish, put_part


def claim(world: World, owner: str = "a", limit: int = 1, lease_s: float = 30) -> list[ClaimedUnit]:
    return world.db.run(lambda session: unit_queries.claim(session, DIGEST, owner, lease_s, limit))


def test_racing_claims_never_get_the_same_unit(world: World) -> None:
    world.add_batch(num_lines=60, unit_lines=1)
    got: list[tuple[str, int]] = []
    lock = threading.Lock()

    def work(owner: str) -> None:
        db = Database(world.settings.database_url)
        while claimed := db.run(lambda session: unit_queries.claim(session, DIGEST, owner, 30, 2)):
            assert len(claimed) <= 2
            with lock:
                got.extend((unit.id, unit.epoch) for unit in claimed)
        db.dispose()

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len({unit_id for unit_id, _ in got}) == 60
    assert {epoch for _, epoch in got} == {1}


def test_claims_come_by_deadline_then_plan_order(world: World) -> None:
    late = world.add_batch(num_lines=4, unit_lines=2)
    soon = world.add_batch(num_lines=4, unit_lines=2, priority_s=600)
    assert [(unit.batch_id, unit.no) for unit in claim(world, limit=10)] == [(soon, 0), (soon, 1), (late, 0), (late, 1)]


def test_only_units_of_running_batches_are_claimable(world: World) -> None:
    for values in ({"status": Status.VALIDATING}, {"status": Status.CANCELLING}, {"expires_ms": 1}):
        batch_id = world.add_batch(num_lines=2, unit_lines=2)
        world.set_batch(batch_id, **values)
    pending = world.add_batch(num_lines=2, unit_lines=2)
    world.set_units(pending, state="pending")
    later = world.add_batch(num_lines=2, unit_lines=2)
    world.set_units(later, not_before_ms=2**50)
    assert claim(world, limit=10) == []
    with world.db.reading() as session:
        assert unit_queries.scaling(session, is_night=True) == {}
    world.add_batch(num_lines=4, unit_lines=2)
    with world.db.reading() as session:
        assert unit_queries.scaling(session, is_night=True)[DIGEST].claimable == 2


def test_a_late_commit_after_a_false_reap_writes_nothing(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    first = claim(world, "a", lease_s=0.05)[0]
    part = put_part(world, first, finish(world, first))
    time.sleep(0.1)
    assert world.db.run(unit_queries.free_expired) == 1
    assert world.db.run(lambda session: unit_queries.commit_part(session, first.id, first.epoch, part)) is False
    second = claim(world, "b")[0]
    assert (second.id, second.epoch) == (first.id, first.epoch + 1)
    assert world.db.run(lambda session: unit_queries.commit_part(session, first.id, first.epoch, part)) is False
    assert not world.parts(batch_id) and world.batch(batch_id).completed == 0
    assert world.units(batch_id)[0].crash_count == 1
    assert world.db.run(lambda session: unit_queries.release(session, first.id, first.epoch)) is False
    ours = put_part(world, second, finish(world, second))
    assert world.db.run(lambda session: unit_queries.commit_part(session, second.id, second.epoch, ours)) is True
    assert world.units(batch_id)[0].state == "done" and world.batch(batch_id).completed == 4


def test_a_repeated_commit_counts_once_and_an_overlap_is_refused(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    unit = claim(world)[0]
    lines = finish(world, unit)
    part = put_part(world, unit, lines[:3])
    for _ in range(2):
        assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part)) is True
    assert world.batch(batch_id).completed == 3 and len(world.parts(batch_id)) == 1
    overlap = put_part(world, unit, lines[2:])
    with pytest.raises(ValueError, match="doesn't fit"):
        world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, overlap))
    beyond = replace(put_part(world, unit, lines[3:]), bitmap=b"\x10")
    with pytest.raises(ValueError, match="doesn't fit"):
        world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, beyond))
    assert world.batch(batch_id).completed == 3


def test_sealing_fences_the_owner_out(world: World) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=4)
    unit = claim(world)[0]
    part = put_part(world, unit, finish(world, unit))
    assert world.db.run(lambda session: unit_queries.seal(session, batch_id)) == 2
    assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part)) is False
    assert world.db.run(lambda session: unit_queries.renew(session, "a", 30, [unit.id])) == []
    assert not world.parts(batch_id)


def test_renewing_prolongs_and_tells_what_stops(world: World) -> None:
    kept = world.add_batch(num_lines=2, unit_lines=2)
    cancelled = world.add_batch(num_lines=2, unit_lines=2)
    units = [unit.id for unit in claim(world, limit=10, lease_s=0.05)]
    world.set_batch(cancelled, status=Status.CANCELLING)
    renewed = world.db.run(lambda session: unit_queries.renew(session, "a", 30, units))
    stops = {unit.id: unit.is_stopping for unit in renewed}
    assert stops == {world.units(kept)[0].id: False, world.units(cancelled)[0].id: True}
    time.sleep(0.1)
    assert world.db.run(unit_queries.free_expired) == 0


def test_a_claim_whose_answer_was_lost_runs_out(world: World) -> None:
    world.add_batch(num_lines=4, unit_lines=2)
    known, _unknown = claim(world, limit=2, lease_s=0.05)
    time.sleep(0.1)
    renewed = world.db.run(lambda session: unit_queries.renew(session, "a", 30, [known.id]))
    assert [unit.id for unit in renewed] == [known.id]
    assert world.db.run(unit_queries.free_expired) == 1, "what its owner never heard of is free again"


def test_a_dead_process_is_freed_at_once_and_no_other(world: World) -> None:
    world.add_batch(num_lines=4, unit_lines=2)
    claim(world, "host:12:aaa")
    claim(world, "host:123:bbb")
    assert world.db.run(lambda session: unit_queries.free_owner(session, "host", 12)) == 1
    assert world.db.run(lambda session: unit_queries.free_owner(session, "host", 12)) == 0


def test_missing_tickets_are_taken_once(world: World) -> None:
    batch_id = world.add_batch(num_lines=6, unit_lines=2)

    def take(limit: int, quiet_s: float) -> int:
        return world.db.run(lambda session: unit_queries.take_tickets_due(session, DIGEST, limit, quiet_s))

    assert (take(2, 60), take(2, 60), take(2, 60)) == (2, 1, 0)
    assert take(9, 0) == 3
    assert world.db.run(lambda session: unit_queries.take_first_tickets(session, batch_id)) == {}
