"""One engine worker in this process: pump, leases and writer on the real database and store, with the fake engine."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from sqlalchemy import select, update

from batchsvc.batches import unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Unit, Worker
from batchsvc.batches.unit_queries import Claim
from batchsvc.db.session import Database
from batchsvc.errors import InvalidRequestError, UnavailableError
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from engine.errors import ModelError
from engine.fake import FakeEngine
from engine.request import Expectation, Request, StepOutput
from tests.dispatchers import NullDispatcher
from tests.workers.conftest import DIGEST, World
from tests.workers.helpers import finish, put_part
from workers.finalize import Finalizer
from workers.pump import EngineLike, told
from workers.step import EngineRun

LIVENESS_S = 30
SEE = "(see worker.crashed in its log)."


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIVENESS_S} s: {what}"
        time.sleep(0.02)


class Hints(NullDispatcher):
    """Remembers which batches were named as ready to be finalized."""

    def __init__(self) -> None:
        self.finalized: deque[str] = deque()

    def finalize(self, batch_id: str) -> None:
        self.finalized.append(batch_id)


@contextmanager
def worker(
    world: World, engine: EngineLike | None = None, *, store: ObjectStore | None = None, name: str = "w", **changes: Any
) -> Iterator[EngineRun]:
    settings: Settings = world.settings.model_copy(update={"poll_s": 0.05, **changes})
    run = EngineRun(
        settings,
        Database(settings.database_url),
        store or world.store,
        Hints(),
        engine or FakeEngine(None),
        digest=DIGEST,
        owner=f"host:1:{name}",
        on_failure=lambda: None,
    )
    run.start()
    try:
        yield run
    finally:
        run.signalled()
        run.signalled()
        run.drain()


def completed(world: World, batch_id: str) -> Callable[[], bool]:
    return lambda: world.batch(batch_id).completed + world.batch(batch_id).failed == world.batch(batch_id).total


def finalized(world: World, batch_id: str, status: Status) -> None:
    assert Finalizer(world.settings, world.db, world.store, "f").finalize(batch_id)
    world.judge(batch_id, status)


def test_batches_run_side_by_side_to_their_end(world: World) -> None:
    batches = [world.add_batch(num_lines=40, unit_lines=8, fold=fold) for fold in (1, 2, 3)]
    with worker(world) as run:
        for batch_id in batches:
            until(completed(world, batch_id), "all lines")
        hints: Any = run._dispatcher
        until(lambda: set(hints.finalized) == set(batches), "the finalizer is called as soon as the last unit is done")
        with world.db.reading() as session:
            assert session.scalars(select(Worker.model_digest)).all() == [DIGEST]
    for batch_id in batches:
        finalized(world, batch_id, Status.COMPLETED)
    with world.db.reading() as session:
        assert not session.scalars(select(Worker)).all(), "a worker that ends in order leaves no row"


def test_the_waiting_set_is_bounded_and_mixes_batches(sqlite_world: World) -> None:
    world = sqlite_world
    batches = [world.add_batch(num_lines=10, unit_lines=5) for _ in range(3)]
    waiting: list[int] = []
    seen_together: set[frozenset[str]] = set()

    class Watched(FakeEngine):
        def step(self) -> StepOutput:
            output = super().step()
            waiting.append(self.num_unfinished() - len(self._running))
            together = [*self._running, *(done.request_id for done in output.completions)]
            seen_together.add(frozenset(request_id.split(":")[0] for request_id in together))
            return output

    with worker(world, Watched(None, max_running=4, tokens_per_s=60), waiting_requests=5):
        for batch_id in batches:
            until(completed(world, batch_id), "all lines")
    assert max(waiting) <= 5 + 1, "a request that the engine is just about to start may be counted once more"
    batch_of = {unit.id: batch_id for batch_id in batches for unit in world.units(batch_id)}
    assert any(len({batch_of[unit_id] for unit_id in units}) > 1 for units in seen_together)


def test_lines_with_several_answers_take_as_much_room_as_these(sqlite_world: World) -> None:
    sqlite_world.params = {"temperature": 0.0, "n": 4}
    batch_id = sqlite_world.add_batch(num_lines=24, unit_lines=12)
    waiting: list[int] = []

    class Watched(FakeEngine):
        def step(self) -> StepOutput:
            output = super().step()
            waiting.append(4 * (self.num_unfinished() - len(self._running)))
            return output

    with worker(sqlite_world, Watched(None, max_running=2, tokens_per_s=400), waiting_requests=6):
        until(completed(sqlite_world, batch_id), "all lines")
    assert 0 < max(waiting) <= 6 + 2 * 4, "and not six lines with 24 answers"


def test_what_later_units_need_is_announced_with_a_unit_and_taken_back_at_its_end(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=12, unit_lines=4)
    announced: list[tuple[str, Expectation | None]] = []

    class Watched(FakeEngine):
        def expect(self, name: str, expectation: Expectation | None) -> None:
            announced.append((name, expectation))

    with worker(world, Watched(None)):
        until(completed(world, batch_id), "all lines")
        until(lambda: len(announced) == 6, "each unit has its first and its last word")
    for unit in world.units(batch_id):
        first, last = [expectation for name, expectation in announced if name == unit.id]
        assert last is None
        assert first is not None
        assert (list(first.prompt_ids), first.uses) == ([1, 2, 3], ((3, 1),))
        assert first.salt, "a project's blocks are its own"


def test_cancelling_keeps_what_is_finished(world: World) -> None:
    batch_id = world.add_batch(num_lines=60, unit_lines=20, max_tokens=8)
    with worker(world, FakeEngine(None, max_running=4, tokens_per_s=60)):
        until(lambda: world.batch(batch_id).completed > 0, "a first part")
        world.set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=2**45)
        until(lambda: all(unit.state != "leased" for unit in world.units(batch_id)), "the leases are given back")
        finalized(world, batch_id, Status.CANCELLED)
    batch = world.batch(batch_id)
    assert 0 < batch.completed < 60


def test_a_unit_taken_away_is_dropped_and_run_by_its_new_owner(world: World) -> None:
    batch_id = world.add_batch(num_lines=30, unit_lines=30, max_tokens=8)
    with worker(world, FakeEngine(None, max_running=2, tokens_per_s=30), flush_s=0.2) as run:
        until(lambda: world.batch(batch_id).completed > 0, "a first part")
        with world.db.transaction() as session:  # one transaction: the owner renews whenever it can
            session.execute(update(Unit).where(Unit.batch_id == batch_id).values(lease_ms=0))
            assert unit_queries.free_expired(session) == 1
            session.flush()
            mine = unit_queries.claim(session, DIGEST, "other", 30, 1)[0]
        until(lambda: run._units.num_live() == 0, "the old owner lets go")
        lines = finish(world, mine)
        part = put_part(world, mine, lines)
        assert world.db.run(lambda session: unit_queries.commit_part(session, mine.id, mine.epoch, part))
    finalized(world, batch_id, Status.COMPLETED)
    assert {part.epoch for part in world.parts(batch_id)} == {1, 2}


def test_a_drain_finishes_what_runs_and_frees_the_rest(world: World) -> None:
    batch_id = world.add_batch(num_lines=40, unit_lines=20, max_tokens=8)
    with worker(world, FakeEngine(None, max_running=4, tokens_per_s=60), flush_s=60) as run:
        until(lambda: run._units.num_live() > 0 and run._engine.stats().output_tokens > 20, "some work")
        run.signalled()
        run.drain()
    units = world.units(batch_id)
    assert {unit.state for unit in units} == {"ready"} and {unit.crash_count for unit in units} == {0}
    assert 0 < world.batch(batch_id).completed < 40
    with worker(world, name="next"):
        until(completed(world, batch_id), "all lines")
    finalized(world, batch_id, Status.COMPLETED)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UnavailableError("The store doesn't answer.", code="store_away"), "The store doesn't answer."),
        (InvalidRequestError("No parameter 'secret'."), f"InvalidRequestError {SEE}"),
        (OSError(28, "No space left on device", "/data/secret"), f"OSError: No space left on device {SEE}"),
        (OSError("secret"), f"OSError {SEE}"),
        (ModelError("There is no model here."), "ModelError: There is no model here."),
        (KeyError("secret"), f"KeyError {SEE}"),
    ],
)
def test_what_is_told_of_the_end_of_a_worker_holds_nothing_of_users(error: Exception, says: str) -> None:
    assert told(error) == says


def test_an_engine_that_fails_ends_the_worker_with_one_sentence(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=8, unit_lines=4)

    class Fails(FakeEngine):
        def step(self) -> StepOutput:
            output = super().step()
            if self.stats().steps == 3:
                raise RuntimeError("out of memory\nwith details")
            return output

    with worker(world, Fails(None, max_running=2)) as run:
        until(lambda: run.failure is not None, "the failure")
        assert run.failure == f"The engine worker stopped: RuntimeError {SEE}", "its text may hold what users sent"
        run.drain()
    assert {unit.crash_count for unit in world.units(batch_id)} <= {0, 1}
    assert sum(unit.crash_count for unit in world.units(batch_id)) >= 1
    assert all(unit.state in {"ready", "done"} for unit in world.units(batch_id))
    with worker(world, name="next"):
        until(completed(world, batch_id), "all lines")
    finalized(world, batch_id, Status.COMPLETED)


def test_a_store_that_is_away_costs_time_only(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=24, unit_lines=4)
    away = [True]

    class Flaky(ObjectStore):
        def put(self, key: str, data: bytes, *, content_type: str = "application/octet-stream") -> str:
            if away[0]:
                if len(data) % 2:
                    super().put(key, data)  # stored, but the answer is lost
                raise UnavailableError("The object store doesn't answer.")
            return super().put(key, data, content_type=content_type)

    with worker(world, store=Flaky(world.settings), waiting_requests=4, lease_s=30) as run:
        until(lambda: run._breaker.is_failing("writes"), "the trouble is seen")
        live = run._units.num_live()
        time.sleep(0.3)
        assert run._units.num_live() <= live + 1, "nothing more is claimed"
        assert world.batch(batch_id).completed == 0
        away[0] = False
        until(completed(world, batch_id), "all lines")
    finalized(world, batch_id, Status.COMPLETED)


def test_a_unit_whose_file_is_damaged_is_for_the_planner_and_the_others_run(world: World) -> None:
    batch_id = world.add_batch(num_lines=4, unit_lines=2)
    damaged = world.units(batch_id)[0]
    world.store.put(damaged.s3_key, world.store.get(damaged.s3_key)[:-1])
    with worker(world):
        until(lambda: world.units(batch_id)[0].state == "pending", "it is given back to be rebuilt")
        until(lambda: world.batch(batch_id).completed == 2, "the other unit's lines")
    assert [(unit.state, unit.crash_count) for unit in world.units(batch_id)] == [("pending", 0), ("done", 0)]


def test_a_worker_that_cannot_renew_fences_itself(sqlite_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=30, unit_lines=30, max_tokens=8)
    monkeypatch.setattr("workers.lease.LeaseKeeper._renew", lambda self: None)
    with worker(world, FakeEngine(None, max_running=1, tokens_per_s=8), lease_s=0.6, renew_s=0.1) as run:
        until(lambda: run._units.num_live() > 0, "a claim")
        before = world.units(batch_id)[0]
        run._units.is_draining = True
        until(lambda: run._units.num_live() == 0, "the unit is given up")
        assert world.units(batch_id)[0].epoch == before.epoch, "it writes nothing, it waits for the reaper"


def test_a_unit_that_is_lost_while_it_is_read_does_not_run(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    epochs: list[int] = []

    class Noting(FakeEngine):
        def add(self, request: Request) -> None:
            epochs.append(int(request.id.split(":")[1]))
            super().add(request)

    class Slow(ObjectStore):
        def get(self, key: str) -> bytes:
            (unit,) = world.units(batch_id)
            if key == unit.s3_key and unit.epoch == 1:
                held = Claim(unit.id, unit.epoch)
                with world.db.transaction() as session:
                    assert unit_queries.release(session, unit.id, unit.epoch)
                until(lambda: not run._leases.is_held(held), "the loss is noticed")
            return super().get(key)

    with worker(world, Noting(None), store=Slow(world.settings), renew_s=0.05) as run:
        until(completed(world, batch_id), "all lines")
    assert set(epochs) == {2}
    finalized(world, batch_id, Status.COMPLETED)


def test_a_unit_whose_reading_ends_in_a_defect_is_not_kept(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    monkeypatch.setattr("workers.intake.open_rows", lambda *_: 1 / 0)
    with worker(world, poll_s=60) as run:
        until(lambda: run._units.has_room(), "room")
        with pytest.raises(ZeroDivisionError):
            run.admit()
        (unit,) = world.units(batch_id)
        assert unit.state == "leased" and not run._leases.is_held(Claim(unit.id, unit.epoch))


def test_a_request_that_cannot_run_is_an_error_line(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=6, unit_lines=3)

    class Picky(FakeEngine):
        def add(self, request: Request) -> None:
            is_bad = request.id.endswith(":1")
            super().add(replace(request, prompt_ids=[-1]) if is_bad else request)

    with worker(world, Picky(None)):
        until(completed(world, batch_id), "all lines")
    finalized(world, batch_id, Status.COMPLETED)
    batch, errors = world.batch(batch_id), world.result(batch_id, "error")
    assert (batch.completed, batch.failed) == (4, 2)
    for line in errors:
        assert line["response"]["status_code"] == 400
        assert line["response"]["body"]["error"]["code"] == "invalid_value", orjson.dumps(line)


def test_tickets_block_until_there_is_room(sqlite_world: World) -> None:
    world = sqlite_world
    world.add_batch(num_lines=12, unit_lines=4, max_tokens=8)
    with worker(world, FakeEngine(None, max_running=1, tokens_per_s=1), waiting_requests=3, poll_s=600) as run:
        until(lambda: run._intake.admit(), "the first ticket claims")
        until(lambda: run._units._room <= 0, "the waiting set is full")
        blocked = threading.Thread(target=run.admit, daemon=True)
        blocked.start()
        time.sleep(0.3)
        assert blocked.is_alive() and run._units.num_live() <= 2
        run.signalled()
        blocked.join(LIVENESS_S)
        assert not blocked.is_alive(), "a drain lets the ticket go"
