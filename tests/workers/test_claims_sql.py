"""Claims by rank in SQL, on both databases: fairness, lanes, the night, pauses, suspects alone."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import select, update

from batchsvc.accounts.tables import Project
from batchsvc.batches import claim_queries, claim_rank, reaper_queries, unit_queries, worker_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Part, Share, Unit, Worker
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.billing.tables import UsageRow
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish, put_part


def claim(world: World, owner: str = "a", limit: int = 1, *, is_night: bool = True) -> list[ClaimedUnit]:
    return world.db.run(lambda session: unit_queries.claim(session, DIGEST, owner, 30, limit, is_night=is_night))


def complete(world: World, unit: ClaimedUnit) -> None:
    part = put_part(world, unit, finish(world, unit))
    assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part))


def shares(world: World) -> dict[str, int]:
    with world.db.reading() as session:
        return {row.project_id: row.vtime for row in session.scalars(select(Share))}


def set_weight(world: World, project: str, weight: int) -> None:
    with world.db.transaction() as session:
        session.execute(update(Project).where(Project.name == project).values(weight=weight))


def test_a_flood_doesnt_delay_a_small_project(world: World) -> None:
    flood = world.add_batch(num_lines=40, unit_lines=2, project="flood", est_tokens=1_000)
    for unit in claim(world, limit=4):
        complete(world, unit)
    held = claim(world, limit=4)
    assert {unit.batch_id for unit in held} == {flood}
    small = world.add_batch(num_lines=6, unit_lines=2, project="small", est_tokens=1_000)
    batches = [claim(world)[0].batch_id for _ in range(6)]
    assert batches[:3] == [small] * 3, "the flood holds four units, so the newcomer is next, three times"
    assert batches[3:] == [flood] * 3


def test_shares_grow_by_what_was_computed_over_the_weight(world: World) -> None:
    world.add_batch(num_lines=4, unit_lines=2, project="one")
    world.add_batch(num_lines=4, unit_lines=2, project="two")
    set_weight(world, "two", 4)
    units = claim(world, limit=4)
    assert len(units) == 4
    for unit in units:
        part = put_part(world, unit, finish(world, unit))
        for _ in range(2):  # the second time the answer was lost: nothing is charged twice
            assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part))  # noqa: B023
    # a line has 4 tokens in, of which 1 is cached, and 2 out
    assert sorted(shares(world).values()) == [0, claim_rank.vtime_of(20, 4), claim_rank.vtime_of(20, 1)]


def test_who_was_idle_starts_level_with_the_others(world: World) -> None:
    world.add_batch(num_lines=40, unit_lines=2, project="busy", est_tokens=10)
    for _ in range(10):
        complete(world, claim(world)[0])
    late = world.add_batch(num_lines=8, unit_lines=2, project="late", est_tokens=10)
    assert late in [claim(world)[0].batch_id for _ in range(2)]
    with world.db.reading() as session:
        vtimes = {row.project_id: row.vtime for row in session.scalars(select(Share))}
        project = session.get_one(Batch, late).project_id
    assert vtimes[project] == vtimes[""] == max(vtimes.values()) > 0


def test_priority_then_deadline_then_age_inside_a_project(world: World) -> None:
    usual = world.add_batch(num_lines=2, unit_lines=2)
    soon = world.add_batch(num_lines=2, unit_lines=2, priority_s=600)
    high = world.add_batch(num_lines=2, unit_lines=2)
    world.set_batch(high, priority=5)
    assert [unit.batch_id for unit in claim(world, limit=3)] == [high, soon, usual]


def test_late_batches_get_three_claims_of_ten_by_deadline(world: World) -> None:
    world.add_batch(num_lines=100, unit_lines=1, project="fair")
    late = world.add_batch(num_lines=100, unit_lines=1, project="late", priority_s=60)
    # the late project has had much more than its share: without the lane it would get nothing
    claim(world)
    with world.db.transaction() as session:
        project = session.get_one(Batch, late).project_id
        session.merge(Share(model_digest=DIGEST, project_id=project, vtime=10**12, panic_credit=0))
    world.set_batch(late, latest_start_ms=now_ms() - 1)
    got = [claim(world)[0].batch_id == late for _ in range(60)]
    assert 0.2 <= sum(got) / len(got) <= 0.3
    assert all(sum(got[:number]) <= 0.3 * number for number in range(1, 61))


def test_the_night_and_what_cant_wait_for_it(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    world.set_batch(batch_id, is_offpeak=True)

    def wanted(is_night: bool) -> dict[str, Any]:
        with world.db.reading() as session:
            return dict(unit_queries.scaling(session, is_night))

    def tickets(is_night: bool) -> int:
        return world.db.run(lambda session: unit_queries.take_tickets_due(session, DIGEST, 9, 0, is_night=is_night))

    assert claim(world, is_night=False) == [] and wanted(False) == {} and tickets(False) == 0
    assert world.db.run(lambda s: unit_queries.take_first_tickets(s, batch_id, is_night=False)) == {}
    assert wanted(True)[DIGEST].claimable == 2 and tickets(True) == 2
    assert world.db.run(lambda s: unit_queries.take_first_tickets(s, batch_id, is_night=True)) == {}, "they have one"
    world.set_batch(batch_id, latest_start_ms=now_ms() - 1)
    assert wanted(False)[DIGEST].claimable == 2
    assert len(claim(world, is_night=False)) == 1
    # a leased unit is work for the worker that has it, and nothing to claim
    assert wanted(False)[DIGEST].claimable == 1
    with world.db.transaction() as session:
        session.execute(update(Unit).where(Unit.state == "ready").values(state="done"))
    assert wanted(False)[DIGEST] == (0, 2)


@pytest.mark.parametrize("values", [{"is_paused": True}, {"has_quota": False}])
def test_what_is_held_back_wants_no_worker(world: World, values: dict[str, Any]) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=2, est_tokens=50)
    claim(world)
    world.set_batch(batch_id, **values)
    assert claim(world) == []
    with world.db.reading() as session:
        found = unit_queries.scaling(session, is_night=True)
    if values.get("is_paused"):
        assert found == {}
        renewed = world.db.run(lambda session: unit_queries.renew(session, "a", 30, _ids(world, batch_id)))
        assert [unit.is_stopping for unit in renewed] == [True], "what runs of it is given back"
    else:
        assert found[DIGEST].claimable == 0


def _ids(world: World, batch_id: str) -> list[str]:
    return [unit.id for unit in world.units(batch_id)]


def test_damaged_lines_of_a_finalizing_batch_are_claimable(world: World) -> None:
    batch_id = world.add_batch(num_lines=2, unit_lines=2, expires_in_s=-1)
    world.set_batch(batch_id, status=Status.FINALIZING, why=Status.CANCELLED)
    assert claim(world) == []
    world.set_batch(batch_id, why=Status.COMPLETED, is_offpeak=True)
    assert len(claim(world, is_night=False)) == 1


def test_suspects_run_alone_on_the_first_engine(world: World) -> None:
    world.add_batch(num_lines=8, unit_lines=2)
    suspects = world.add_batch(num_lines=4, unit_lines=2, project="suspects")
    world.set_units(suspects, is_suspect=True)
    for name in ("w1", "w2"):
        world.db.run(lambda session, name=name: worker_queries.register(session, name, DIGEST))
    ordinary = claim(world, "w2")
    assert ordinary and ordinary[0].batch_id != suspects, "the second engine takes other work"
    first = claim(world, "w1", limit=5)
    assert [unit.batch_id for unit in first] == [suspects] and first[0].is_suspect
    assert claim(world, "w1") == [], "and nothing beside it"
    assert claim(world, "w2")[0].batch_id != suspects
    complete(world, first[0])
    second = claim(world, "w1", limit=5)
    assert [unit.batch_id for unit in second] == [suspects]
    complete(world, second[0])
    assert {unit.batch_id for unit in claim(world, "w1", limit=5)}.isdisjoint({suspects})


def test_suspects_do_not_wait_for_an_engine_that_is_silent(world: World) -> None:
    """It may be dead: its lease says so after 30 s only, two missed heartbeats after 10."""
    suspects = world.add_batch(num_lines=4, unit_lines=2)
    world.set_units(suspects, is_suspect=True)
    for name in ("w1", "w2"):
        world.db.run(lambda session, name=name: worker_queries.register(session, name, DIGEST))
    silence = update(Worker).where(Worker.id == "w1")
    with world.db.transaction() as session:
        session.execute(silence.values(beat_ms=Worker.beat_ms - 6_000))
    assert claim(world, "w2") == [], "one late heartbeat is no death"
    with world.db.transaction() as session:
        session.execute(silence.values(beat_ms=Worker.beat_ms - 6_000))
    assert [unit.is_suspect for unit in claim(world, "w2")] == [True]
    assert claim(world, "w1") == [], "one engine at a time, also when it is heard of again"


def test_an_engine_with_work_becomes_empty_before_it_takes_a_suspect(world: World) -> None:
    batch_id = world.add_batch(num_lines=6, unit_lines=2)
    world.db.run(lambda session: worker_queries.register(session, "w1", DIGEST))
    busy = claim(world, "w1")[0]
    with world.db.transaction() as session:
        suspect = session.scalars(
            select(Unit.id).where(Unit.batch_id == batch_id, Unit.state == "ready").limit(1)
        ).one()
        session.execute(update(Unit).where(Unit.id == suspect).values(is_suspect=True))
    assert claim(world, "w1") == []
    complete(world, busy)
    assert [unit.id for unit in claim(world, "w1")] == [suspect]


def test_racing_claims_and_commits_charge_once_and_never_deadlock(world: World) -> None:
    for project in ("one", "two", "three"):
        world.add_batch(num_lines=16, unit_lines=2, project=project)
    errors: list[BaseException] = []
    counted: list[str] = []

    def work(owner: str) -> None:
        db = Database(world.settings.database_url)
        try:
            while units := db.run(lambda session: unit_queries.claim(session, DIGEST, owner, 30, 2)):
                for unit in units:
                    part = put_part(world, unit, finish(world, unit))
                    assert db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part))  # noqa: B023
                    counted.append(unit.id)
        except BaseException as error:
            errors.append(error)
        finally:
            db.dispose()

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert Counter(counted).most_common(1)[0][1] == 1 and len(counted) == 24
    assert sorted(shares(world).values())[1:] == [claim_rank.vtime_of(16 * 5, 1)] * 3


def test_latest_starts_follow_the_rate(world: World) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=4, expires_in_s=1_000)
    world.set_batch(batch_id, est_tokens=10_000)

    def slack_ms() -> int:
        world.db.run(reaper_queries.keep_latest_starts)
        batch = world.batch(batch_id)
        assert batch.latest_start_ms is not None
        return batch.expires_ms - batch.latest_start_ms

    assert slack_ms() == pytest.approx(250_000, abs=10), "no rate is known: a quarter of the window"
    for unit in claim(world, limit=2):
        complete(world, unit)
    with world.db.transaction() as session:
        for part in world.parts(batch_id):
            row = session.merge(part)
            row.created_ms, row.est_tokens = now_ms() - 100_000, 1_000
        session.get_one(Batch, batch_id).est_done_tokens = 2_000
    # 2,000 tokens in 100 s, and 8,000 remain: 400 s, and a tenth of the window
    assert slack_ms() == pytest.approx(500_000, rel=0.02)
    assert world.db.run(reaper_queries.keep_latest_starts) == 0, "what hasn't changed isn't written"


def test_of_several_models_the_one_decides_that_must_start_first(world: World) -> None:
    """Their work runs side by side: 1,000 tokens at 10 a second need as long as 200 at 2."""
    batch_id, other = world.add_batch(num_lines=8, unit_lines=2, expires_in_s=1_000, est_tokens=1_000), "e" * 64
    world.mix(batch_id, other, every=2)  # units 0 and 2 are of the other model
    world.set_batch(batch_id, est_tokens=4_000)

    def slack_ms() -> int:
        world.db.run(reaper_queries.keep_latest_starts)
        batch = world.batch(batch_id)
        return batch.expires_ms - (batch.latest_start_ms or 0)

    assert slack_ms() == pytest.approx(250_000, abs=10), "no rate is known"
    (mine,) = claim(world, limit=1)
    (theirs,) = world.db.run(lambda session: unit_queries.claim(session, other, "b", 30, 1))
    for unit, done in ((mine, 1_000), (theirs, 200)):
        complete(world, unit)
        with world.db.transaction() as session:
            (row,) = session.scalars(select(Part).where(Part.unit_id == unit.id))
            row.created_ms, row.est_tokens = now_ms() - 100_000, done
    left = 1_000 + 2  # of each model: a unit, and its two lines
    assert slack_ms() == pytest.approx(100_000 + 1_000 * left / 2, rel=0.02), "the slower one's 2 tokens a second"
    world.set_units(batch_id, est_tokens=0)
    assert slack_ms() == pytest.approx(100_000 + 1_000 * 2 / 2, rel=0.1)


def test_remaining_work_counts_lines_that_have_no_estimate(world: World) -> None:
    world.add_batch(num_lines=4, unit_lines=4, est_tokens=400)
    unit = claim(world)[0]
    part = put_part(world, unit, finish(world, unit)[:3])
    assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part))
    with world.db.reading() as session:
        assert session.scalar(select(claim_queries.remaining_tokens()).where(Unit.id == unit.id)) == 101


def test_units_of_several_models_go_to_the_workers_of_theirs(world: World) -> None:
    batch_id, other = world.add_batch(num_lines=12, unit_lines=2), "e" * 64
    world.mix(batch_id, other)
    pins = world.batch(batch_id).models or {}
    rates, dear = pins["a"]["rates"], pins["b"]["rates"]
    mine = claim(world, limit=10)
    assert [(unit.no, unit.model_id, unit.rates) for unit in mine] == [(no, "a", rates) for no in (1, 2, 4, 5)]
    theirs = world.db.run(lambda session: unit_queries.claim(session, other, "b", 30, 10))
    assert [(unit.no, unit.model_id, unit.rates) for unit in theirs] == [(no, "b", dear) for no in (0, 3)]
    complete(world, mine[0])
    complete(world, theirs[0])
    with world.db.reading() as session:
        used = {row.model: row.cost_nanos for row in session.scalars(select(UsageRow))}
    assert used == {"a": 2 * 112, "b": 2 * 1125}, "a line of the first costs 112.5, which is rounded to even"
