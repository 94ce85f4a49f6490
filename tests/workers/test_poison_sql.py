"""Crashes in SQL and in the reaper, on both databases: splitting keeps every line, poison ends as one error line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from batchsvc.batches import poison, poison_queries, retry, unit_file, unit_queries, worker_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Unit
from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.errors import InvalidRequestError, NotFoundError
from tests.dispatchers import NullDispatcher
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish, put_part
from workers.finalize import Finalizer
from workers.poison import Condemner
from workers.reaper import Reaper
from workers.translate import open_rows


def claim(world: World, owner: str = "host:1:a", limit: int = 1) -> list[ClaimedUnit]:
    return world.db.run(lambda session: unit_queries.claim(session, DIGEST, owner, 30, limit))


def crash(world: World, owner: str = "host:1:a") -> int:
    host, pid, _ = owner.split(":")
    return world.db.run(lambda session: unit_queries.free_owner(session, host, int(pid)))


def commit(world: World, unit: ClaimedUnit, most_lines: int | None = None) -> None:
    part = put_part(world, unit, finish(world, unit, most_lines))
    assert world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, part))


def condemn(world: World, unit: ClaimedUnit) -> None:
    """What the reaper does with a unit of one line that is poison."""
    part = put_part(world, unit, finish(world, unit))

    def end(session: Session) -> None:
        assert unit_queries.commit_part(session, unit.id, unit.epoch, part)
        poison_queries.note_poison(session, unit.batch_id, part.id)

    world.db.run(end)


def lines_of(world: World, unit: ClaimedUnit) -> set[int]:
    rows = open_rows(unit, unit_file.read(world.store.get(unit.s3_key)))
    return {row.row.line_nos[member] for row in rows for _, member in row.members}


def test_two_crashes_in_a_row_split_what_is_unfinished(world: World) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=8, est_tokens=800)
    unit = claim(world)[0]
    commit(world, unit, 1)
    for _ in range(poison.CRASHES):
        assert crash(world) == 1
        claim(world)
    assert crash(world) == 1, "a suspect half that crashes is split at once"
    units = world.units(batch_id)
    assert [row.num_lines - row.num_done for row in units] == [3, 2, 2], "of the halves, 3 and 4, the bigger one ran"
    assert all(row.is_suspect and row.state == "ready" and row.crash_count == 0 for row in units)
    assert [row.parent_id for row in units] == [None, units[0].id, units[1].id]
    taken: list[set[int]] = []
    while got := claim(world):
        taken.append(lines_of(world, got[0]))
        commit(world, got[0])
    assert [len(lines) for lines in taken] == [3, 2, 2], "the biggest first, one at a time"
    assert len(set().union(*taken)) == 7
    assert world.batch(batch_id).completed == 8 and {row.state for row in world.units(batch_id)} == {"done"}
    assert Finalizer(world.settings, world.db, world.store, "fin").finalize(batch_id)
    world.judge(batch_id, Status.COMPLETED)


def test_progress_clears_a_unit_and_its_batch(world: World) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=8)
    for _ in range(6):
        unit = claim(world)[0]
        crash(world)
        unit = claim(world)[0]
        assert world.units(batch_id)[0].crash_count == 1
        commit(world, unit, 1)
        assert world.units(batch_id)[0].crash_count == 0 and world.batch(batch_id).crash_times is None
        assert world.db.run(lambda session: unit_queries.release(session, unit.id, unit.epoch))  # noqa: B023
    assert len(world.units(batch_id)) == 1 and not world.batch(batch_id).is_paused


def test_a_poison_line_becomes_one_error_line_and_all_others_are_delivered(world: World) -> None:
    """Every engine that has line 5 dies at once; everybody else's lines come out."""
    batch_id = world.add_batch(num_lines=12, unit_lines=6)
    other = world.add_batch(num_lines=4, unit_lines=2, project="other")
    condemner, crashes = Condemner(world.db, world.store), 0
    for _ in range(200):
        for unit in world.db.run(lambda session: unit_queries.claim_poison(session, "reaper", 30, 8)):
            assert condemner.condemn(unit)
        claimed = claim(world, limit=4)
        if not claimed:
            break
        if any(unit.batch_id == batch_id and 5 in lines_of(world, unit) for unit in claimed):
            crashes += 1
            assert crash(world) == len(claimed)
            continue
        for unit in claimed:
            commit(world, unit)
    assert crashes <= 2 + 3 + 2, "6 lines are halved three times"
    assert not world.batch(batch_id).is_paused and not world.batch(other).is_paused
    for ended in (batch_id, other):
        assert Finalizer(world.settings, world.db, world.store, "fin").finalize(ended)
        world.judge(ended, Status.COMPLETED)
    errors = world.result(batch_id, "error")
    assert [line["line"] for line in errors] == [5]
    assert errors[0]["response"]["body"]["error"]["code"] == "poison"
    assert world.result(other, "error") == []


def test_poison_isnt_claimable_and_waits_for_the_reaper(world: World) -> None:
    batch_id = world.add_batch(num_lines=1, unit_lines=1)
    world.set_units(batch_id, is_suspect=True, crash_count=2)
    assert claim(world) == []
    with world.db.reading() as session:
        assert unit_queries.scaling(session, is_night=True) == {}

    def nothing(_: str) -> None:
        pass

    reaper = Reaper(
        world.settings, world.db, world.store, NullDispatcher(), plan=nothing, finalize=nothing, quote=nothing
    )
    reaper.tick()
    assert world.batch(batch_id).failed == 1 and world.units(batch_id)[0].state == "done"


def test_poison_whose_file_is_away_is_tried_again_later(world: World) -> None:
    batch_id = world.add_batch(num_lines=1, unit_lines=1)
    world.set_units(batch_id, is_suspect=True, crash_count=2, s3_key="gone")
    unit = world.db.run(lambda session: unit_queries.claim_poison(session, "reaper", 30, 8))[0]
    assert not Condemner(world.db, world.store).condemn(unit)
    row = world.units(batch_id)[0]
    assert (row.state, row.crash_count, row.num_done) == ("ready", 2, 0)


def crashing(world: World, batch_id: str) -> Iterator[int]:
    """Crashes without progress, a minute apart."""
    for number in range(1, 20):
        while claim(world):
            pass
        crash(world)
        with world.db.transaction() as session:
            batch = session.get_one(Batch, batch_id)
            batch.crash_times = [time - 60_000 for time in batch.crash_times or ()]
        yield number


def test_the_brake_pauses_a_batch_that_only_crashes_and_an_operator_resumes_it(world: World) -> None:
    batch_id = world.add_batch(num_lines=16, unit_lines=4)
    number = next(number for number in crashing(world, batch_id) if world.batch(batch_id).is_paused)
    assert number == poison.BRAKE_MOST + 1
    assert world.batch(batch_id).pause_reason == "engines crashed 4 times in a row while they ran it"
    assert claim(world) == []
    world.db.run(lambda session: poison_queries.resume(session, batch_id))
    resumed = world.batch(batch_id)
    assert (resumed.is_paused, resumed.pause_reason, resumed.crash_times) == (False, None, None)
    while got := claim(world):
        commit(world, got[0])
    assert Finalizer(world.settings, world.db, world.store, "fin").finalize(batch_id)
    world.judge(batch_id, Status.COMPLETED)


def test_crashes_while_calls_were_open_make_suspects_and_pause_nothing(world: World) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=4)
    with world.db.transaction() as session:
        worker_queries.beat(session, "host:1:a", DIGEST, is_draining=False, stats={"calls": 2})
    for _ in range(poison.CRASHES):
        assert len(claim(world, limit=9)) == 2
        assert crash(world) == 2
    assert all(unit.is_suspect for unit in world.units(batch_id)) and world.batch(batch_id).crash_times is None
    claim(world)
    crash(world)
    assert len(world.batch(batch_id).crash_times or ()) == 1, "no call ran beside a suspect"


def test_many_poison_lines_pause_a_batch(world: World) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=1)
    for _ in range(poison.BRAKE_MOST):
        condemn(world, claim(world)[0])
    assert not world.batch(batch_id).is_paused
    condemn(world, claim(world)[0])
    assert world.batch(batch_id).pause_reason == "4 of its requests each ended an engine process twice"


def test_engines_that_are_cut_off_together_are_one_incident(world: World) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=1)
    for number in range(8):
        claim(world, f"host:{number + 1}:a")
    for number in range(8):
        assert crash(world, f"host:{number + 1}:a") == 1
    assert len(world.batch(batch_id).crash_times or ()) == 1


def test_pausing_by_hand_and_what_cant_be_resumed(world: World) -> None:
    batch_id = world.add_batch(num_lines=2, unit_lines=1)
    paused = world.db.run(lambda session: poison_queries.pause(session, batch_id, "by an operator"))
    assert paused.is_paused and claim(world) == []
    with pytest.raises(NotFoundError, match="no batch batch_x"):
        world.db.run(lambda session: poison_queries.resume(session, "batch_x"))
    world.set_batch(batch_id, status=Status.COMPLETED, ended_ms=1)
    with pytest.raises(InvalidRequestError, match="is completed: it can't be resumed"):
        world.db.run(lambda session: poison_queries.resume(session, batch_id))


def test_a_crash_of_a_stopped_batch_frees_and_judges_nothing(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    claim(world)
    world.set_batch(batch_id, status=Status.CANCELLING)
    world.set_units(batch_id, crash_count=1)
    assert crash(world) == 1
    assert len(world.units(batch_id)) == 1 and world.batch(batch_id).crash_times is None


def test_failed_lines_run_again_three_times_within_the_budget(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    unit = claim(world)[0]

    def back(failures: dict[int, int], epoch: int | None = None) -> unit_queries.ReturnedLines | None:
        return world.db.run(lambda session: unit_queries.return_lines(session, unit.id, epoch or unit.epoch, failures))

    first = back({0: 1, 2: 1})
    assert first is not None and first.again == {0, 2} and not first.failed and 0 <= first.delay_s <= 1
    assert back({0: 1, 2: 1}) is not None and world.batch(batch_id).num_retries == 2, "the same again changes nothing"
    assert back({0: 1}, epoch=unit.epoch + 1) is None, "somebody else's"
    assert world.db.run(lambda session: unit_queries.release(session, unit.id, unit.epoch))
    unit = claim(world)[0]
    assert unit.attempts == {0: 1, 2: 1}
    second = back({0: 2, 2: 3})
    assert second is not None and (second.again, second.failed) == ({0}, {2})
    world.set_batch(batch_id, num_retries=retry.budget(4))
    last = back({1: 1, 0: 2})
    assert last is not None and (last.again, last.failed) == ({0}, {1}), "the budget is used up"
    assert world.units(batch_id)[0].attempts == {"0": 2, "2": 3, "1": 3}


def test_what_a_suspect_saved_is_dropped_when_it_is_split(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    world.set_units(batch_id, is_suspect=True, resume_key="k", resume_sha256="s", running_lines=1, running_tokens=9)
    world.set_batch(batch_id, running_tokens=9, running_lines=1)
    claim(world)
    crash(world)
    assert [row.resume_key for row in world.units(batch_id)] == [None, None]
    assert (world.batch(batch_id).running_tokens, world.batch(batch_id).running_lines) == (0, 0)
    with world.db.reading() as session:
        assert session.scalars(select(Unit.num_done).where(Unit.batch_id == batch_id)).all() == [2, 2]
