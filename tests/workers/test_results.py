"""Results as they come: each line once for whoever follows the cursor, whatever dies or is taken back meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batchsvc.batches import damage, finalize_queries, garbage_queries, result_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Part
from batchsvc.errors import InvalidRequestError, NotFoundError, UnavailableError
from batchsvc.files.tables import File
from tests.workers.conftest import DIGEST, World
from tests.workers.following import Follower
from tests.workers.helpers import finish, put_part
from tests.workers.test_finalize import commit, finalizer, run_units
from workers.garbage import Collector

CANCEL: dict[str, Any] = {"status": Status.CANCELLING, "cancelling_ms": 1}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage is believed after several looks; here they follow each other at once."""
    monkeypatch.setattr(damage, "_PAUSE_S", 0.0)


def part_lines(world: World, batch_id: str) -> list[list[int]]:
    """Line numbers of the parts in order of commit, from the objects."""
    from batchsvc.batches import part_file

    parts = sorted(world.parts(batch_id), key=lambda part: part.seq or 0)
    return [sorted(line.line_no for line in part_file.decode(world.store.get(part.s3_key))) for part in parts]


def test_lines_come_in_order_of_commit_while_the_batch_runs_and_after(world: World) -> None:
    batch_id = world.add_batch(num_lines=12, unit_lines=4, windows=2)
    follower, late = Follower(world, batch_id), Follower(world, batch_id)
    assert follower.read() == 0 and follower.status == "in_progress"
    run_units(world, most_units=2)
    assert follower.read() == 8
    run_units(world)
    follower.read_all(limit=3)
    expected = [number for part in part_lines(world, batch_id) for number in part]
    assert follower.numbers == expected
    assert finalizer(world).finalize(batch_id) is True
    assert follower.read() == 0 and follower.status == "completed"
    follower.judge()
    late.read_all(limit=5)
    assert late.lines == follower.lines, "after the end the order is the same"
    published = {line["line"]: line for line in world.result(batch_id, "output")}
    assert all({**line} == {**published[line["line"]], "cursor": line["cursor"]} for line in late.lines)


@pytest.mark.parametrize("why", [Status.CANCELLED, Status.EXPIRED])
def test_lines_that_never_ran_come_last(world: World, why: Status) -> None:
    batch_id = world.add_batch(num_lines=12, unit_lines=4)
    follower = Follower(world, batch_id)
    run_units(world, most_units=2, lines=3)
    follower.read()
    assert len(follower.lines) == 6
    world.set_batch(batch_id, **(CANCEL if why == Status.CANCELLED else {"expires_ms": 1}))
    assert finalizer(world).finalize(batch_id) is True
    follower.read_all(limit=2)
    follower.judge()
    tail = follower.lines[6:]
    assert [line["line"] for line in tail] == sorted(line["line"] for line in tail)
    assert {line["error"]["code"] for line in tail} == {f"batch_{why}"} and all(not line["response"] for line in tail)


@pytest.mark.parametrize("has_read", [True, False])
@pytest.mark.parametrize("why", [Status.COMPLETED, Status.CANCELLED])
def test_lines_of_a_part_that_was_taken_back_keep_their_place(world: World, has_read: bool, why: Status) -> None:
    batch_id = world.add_batch(num_lines=8, unit_lines=4)
    follower = Follower(world, batch_id)
    run_units(world, most_units=1 if why == Status.CANCELLED else 2)
    order = part_lines(world, batch_id)
    if has_read:
        follower.read(limit=len(order[0]) + 1)
    if why == Status.CANCELLED:
        world.set_batch(batch_id, **CANCEL)
    lost = min(world.parts(batch_id), key=lambda part: part.seq or 0)
    world.store.delete([lost.s3_key])
    assert finalizer(world).finalize(batch_id) is False
    before = len(follower.lines)
    if not has_read and why == Status.COMPLETED:
        assert follower.read() == 0 and follower.status == "finalizing", "it waits at the gap"
    else:
        follower.read_all()
    run_units(world)
    world.set_batch(batch_id, fin_lease_ms=0)
    assert finalizer(world).finalize(batch_id) is True
    follower.read_all(limit=2)
    follower.judge()
    if why == Status.COMPLETED:
        assert follower.numbers == [number for part in order for number in part], "every line has its first place"
    codes = {line["error"]["code"] for line in follower.lines[before:] if line["error"]}
    assert codes == (set() if why == Status.COMPLETED else {"batch_cancelled"})
    late = Follower(world, batch_id)
    late.read_all(limit=3)
    late.judge()
    assert late.numbers == follower.numbers


def test_a_worker_that_lost_its_unit_adds_no_line(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    (unit,) = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "slow", 30, 1))
    late = put_part(world, unit, finish(world, unit))
    follower = Follower(world, batch_id)
    commit(world, unit, put_part(world, unit, finish(world, unit, 2)))
    follower.read()
    world.set_units(batch_id, lease_ms=1)
    world.db.run(unit_queries.free_expired)
    run_units(world)
    assert not world.db.run(lambda session: unit_queries.commit_part(session, unit.id, unit.epoch, late))
    follower.read_all()
    assert finalizer(world).finalize(batch_id)
    follower.read_all()
    follower.judge()


def test_input_order_waits_for_the_first_line_that_lacks(world: World) -> None:
    batch_id = world.add_batch(num_lines=10, unit_lines=3, windows=2)
    follower = Follower(world, batch_id, order="input")
    for _ in range(7):
        run_units(world, most_units=1)
        follower.read_all(limit=4)
        done = {number for part in part_lines(world, batch_id) for number in part}
        first_gap = next((number for number in range(1, 22) if number not in done), 0)
        assert follower.numbers == list(range(1, first_gap))
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    follower.read_all(limit=3)
    follower.judge()
    again = Follower(world, batch_id, order="input")
    again.read_all(limit=7)
    again.judge()


def test_input_order_joins_both_files_after_the_end(world: World) -> None:
    batch_id = world.add_batch(num_lines=12, unit_lines=4)
    follower = Follower(world, batch_id, order="input")
    run_units(world, most_units=2, lines=3)
    follower.read()
    world.set_batch(batch_id, **CANCEL)
    assert finalizer(world).finalize(batch_id)
    follower.read_all(limit=1)
    follower.judge()


def test_a_cursor_of_elsewhere_is_refused(sqlite_world: World) -> None:
    world = sqlite_world
    one, two = (world.add_batch(num_lines=4, unit_lines=4) for _ in range(2))
    run_units(world)
    follower = Follower(world, one)
    follower.read()
    for batch_id, order, after in (
        (two, "completion", follower.after),
        (one, "input", follower.after),
        (one, "completion", "nonsense"),
        (one, "completion", ""),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            Follower(world, batch_id, order, after).read()
        assert refused.value.param == "after"
    world.set_batch(one, part_seq=0)
    with pytest.raises(InvalidRequestError, match="restored"):
        Follower(world, one, "completion", follower.after).read()


def test_parts_stay_as_long_as_the_results(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    collector = Collector(world.settings.model_copy(update={"garbage_grace_s": -5.0}), world.db, world.store)
    collector.audit()
    follower = Follower(world, batch_id)
    follower.read_all()
    follower.judge()
    with world.db.transaction() as session:
        for file in session.query(File).all():
            file.deleted_ms = 1
    with pytest.raises(NotFoundError, match="are gone"):
        Follower(world, batch_id).read()
    collector.audit()
    with world.db.reading() as session:
        keys = [part.s3_key for part in session.query(Part).all()]
        assert garbage_queries.referred_to(session, keys) == set()
    assert not any(world.store.head(key) for key in keys)


def test_an_ended_batch_whose_parts_are_gone_says_so(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    world.store.delete([part.s3_key for part in world.parts(batch_id)])
    with pytest.raises(UnavailableError, match="result files"):
        Follower(world, batch_id).read()
    ordered = Follower(world, batch_id, order="input")
    ordered.read_all()
    ordered.judge()


def test_parts_that_an_older_worker_has_added_are_numbered_at_the_end(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    follower = Follower(world, batch_id)
    run_units(world)
    with world.db.transaction() as session:
        for part in session.query(Part).all():
            part.seq = part.line_nos = None
    assert follower.read() == 0
    assert finalizer(world).finalize(batch_id)
    follower.read_all()
    follower.judge()


def test_of_parts_of_one_millisecond_the_last_one_committed_is_the_newest(world: World) -> None:
    batch_id = world.add_batch(num_lines=6, unit_lines=2)
    run_units(world)
    with world.db.transaction() as session:
        for part in session.query(Part).all():
            part.created_ms, part.lines_err, part.seq = 1, 1, None if part.seq == 3 else part.seq
    with world.db.reading() as session:
        newest = result_queries.newest_parts_with_errors(session, batch_id, 4)
    keys = {part.s3_key: part.seq for part in world.parts(batch_id)}
    assert [keys[key] for key, _ in newest] == [6, 5, 4, 2], "one without a number is an older worker's"


STEPS = st.lists(
    st.sampled_from(["run", "half", "lose", "damage", "finalize", "read", "read input", "cancel", "expire"]),
    max_size=12,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, limit=st.integers(1, 4))
@example(steps=["half", "read", "run", "finalize", "damage", "read", "finalize", "read", "run", "read"], limit=1)
@example(steps=["run", "damage", "finalize", "read", "expire", "run", "read input", "finalize"], limit=2)
def test_no_history_repeats_or_loses_a_line(sqlite_world: World, steps: list[str], limit: int) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=6, unit_lines=3, windows=2)
    followers = [Follower(world, batch_id), Follower(world, batch_id, order="input")]
    held: Any = None
    for step in steps:
        if step == "run":
            run_units(world, most_units=1)
        elif step == "half":
            claimed = world.db.run(lambda session: unit_queries.claim(session, DIGEST, "w", 30, 1))
            held = claimed[0] if claimed else held
            if claimed and (lines := finish(world, held, 1)):
                commit(world, held, put_part(world, held, lines))
        elif step == "lose":
            world.set_units(batch_id, lease_ms=0)
            world.db.run(unit_queries.free_expired)
        elif step == "damage":
            counting = [part for part in world.parts(batch_id) if not part.is_void]
            if counting and world.batch(batch_id).ended_ms is None:
                world.store.delete([counting[0].s3_key])
        elif step == "finalize":
            world.set_batch(batch_id, fin_lease_ms=0)
            finalizer(world).finalize(batch_id)
        elif step in ("read", "read input"):
            followers[step == "read input"].read(limit)
        elif world.batch(batch_id).status == Status.IN_PROGRESS:
            world.set_batch(batch_id, **(CANCEL if step == "cancel" else {"expires_ms": 1}))
    _end(world, batch_id)
    for follower in followers:
        follower.read_all()
        follower.judge()


def _end(world: World, batch_id: str) -> None:
    """Whatever it takes until the batch has ended."""
    for _ in range(20):
        if world.batch(batch_id).ended_ms is not None:
            return
        world.set_units(batch_id, lease_ms=0)
        world.db.run(unit_queries.free_expired)
        run_units(world)
        if world.batch(batch_id).status == Status.FINALIZING:
            world.set_batch(batch_id, fin_lease_ms=0)
        finalizer(world).finalize(batch_id)
    raise AssertionError("the batch doesn't end")


def test_the_finalizer_voids_what_readers_wait_for(sqlite_world: World) -> None:
    """A void of hand, as in a test of the queries: the place of the lines is the first part's, whoever has them now."""
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    run_units(world)
    world.set_batch(batch_id, status=Status.FINALIZING, why=Status.COMPLETED, fin_epoch=1)
    first = min(world.parts(batch_id), key=lambda part: part.seq or 0)
    world.db.run(lambda session: finalize_queries.void_part(session, batch_id, 1, first.id))
    order = part_lines(world, batch_id)
    run_units(world)
    follower = Follower(world, batch_id)
    follower.read_all(limit=1)
    assert follower.numbers == order[0] + order[1]
