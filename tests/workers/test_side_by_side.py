"""What goes into one engine beside what: a request that is stopped on its way in, and a suspect that runs alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import select

from batchsvc.batches.tables import Worker
from batchsvc.db.session import Database
from engine.errors import RequestError
from engine.fake import FakeEngine
from engine.request import Completion, Expectation, Lane, NewText, Request, SamplingParams
from tests.dispatchers import NullDispatcher
from tests.workers.conftest import DIGEST, World
from tests.workers.test_interactive import call
from workers.pump import Pump
from workers.step import EngineRun


class OneRequest:
    """A source with one request; `on_take` is called while the pump takes it."""

    def __init__(self) -> None:
        self.waiting = [Request(id="r", prompt_ids=[1, 2], params=SamplingParams(max_tokens=4), lane=Lane.INTERACTIVE)]
        self.ended: list[str] = []

    def on_take(self) -> None:
        pass

    def announce(self) -> list[tuple[str, Expectation | None]]:
        return []

    def take(self, room: int) -> list[Request]:
        taken, self.waiting = self.waiting, []
        self.on_take()
        return taken

    def finish(self, completion: Completion) -> None:
        self.ended.append(completion.request_id)

    def refuse(self, request_id: str, error: RequestError) -> None:
        raise AssertionError("nothing is wrong with it")

    def grow(self, request_id: str, texts: list[NewText]) -> None:
        raise AssertionError("it isn't streamed")


class Noting(FakeEngine):
    """Notes what it is given; `on_add` is called just before."""

    def __init__(self) -> None:
        super().__init__(None)
        self.added: list[str] = []

    def on_add(self) -> None:
        pass

    def add(self, request: Request) -> None:
        self.added.append(request.id)
        self.on_add()
        super().add(request)


def run_to_end(pump: Pump, engine: FakeEngine) -> None:
    """As the two threads of the pump do."""
    while engine.has_work():
        output = engine.step()
        pump._note(output)
        pump._ended.extend(output.completions)
    pump._hand_out()


@pytest.mark.parametrize("way", ["abort", "withdraw"])
@pytest.mark.parametrize("moment", ["on_take", "on_add"])
def test_a_request_that_is_stopped_while_it_goes_into_the_engine_does_not_run(
    way: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.pump._LAST_STEP_S", 0.0)  # no other thread steps
    source, engine = OneRequest(), Noting()
    pump = Pump(engine, waiting_requests=4)
    pump.attach(source)
    monkeypatch.setattr(source if moment == "on_take" else engine, moment, lambda: getattr(pump, way)(["r"]))
    pump._fill()
    run_to_end(pump, engine)
    assert engine.stats().output_tokens == 0 and not source.ended
    assert not pump._inside and not pump._leaving and not pump._missed
    source.waiting = [Request(id="s", prompt_ids=[1, 2], params=SamplingParams(max_tokens=4))]
    monkeypatch.undo()
    pump._fill()
    run_to_end(pump, engine)
    assert source.ended == ["s"]


@contextmanager
def still_worker(world: World, engine: FakeEngine) -> Iterator[EngineRun]:
    """One whose threads don't run: the test takes their steps."""
    db = Database(world.settings.database_url)
    run = EngineRun(
        world.settings, db, world.store, NullDispatcher(), engine, digest=DIGEST, owner="w", on_failure=lambda: None
    )
    db.run(run._register)
    yield run
    run._lease_db.dispose()
    db.dispose()


def test_no_call_runs_beside_a_suspect(sqlite_world: World) -> None:
    batch = sqlite_world.add_batch(num_lines=2, unit_lines=2)
    sqlite_world.set_units(batch, is_suspect=True)
    engine = Noting()
    with still_worker(sqlite_world, engine) as run:
        run._calls.begin(call("c1"))
        run._pump._fill()
        assert run._intake._claim() and run._calls.room() == 0
        run._calls.begin(call("c2"))  # was on its way
        run._pump._fill()
        assert engine.added == ["c1"], "the suspect waits for the call that runs, and the next call for the suspect"
        run_to_end(run._pump, engine)
        run._pump._fill()
        (live,) = run._units._live.values()
        assert engine.added == ["c1", *live.open]
        run_to_end(run._pump, engine)
        run._pump._fill()
        assert engine.added[-1] != "c2", "its lines are being written"
        run._units.lost([live.unit.claim])
        run._pump._fill()
        assert engine.added[-1] == "c2" and run._calls.room() > 0


@pytest.mark.parametrize("is_suspect", [False, True])
def test_an_engine_that_fails_with_calls_open_says_so_and_is_no_crash_of_a_suspect_that_waits(
    sqlite_world: World, is_suspect: bool
) -> None:
    batch = sqlite_world.add_batch(num_lines=2, unit_lines=2)
    sqlite_world.set_units(batch, is_suspect=is_suspect)
    with still_worker(sqlite_world, Noting()) as run:
        run._calls.begin(call("c1"))
        run._pump._fill()
        assert run._intake._claim()
        run._pump.crashed(RuntimeError("a call that the engine can't stand"))
        run._tell_of_failure()
        run._calls.stop_all()
        with sqlite_world.db.reading() as session:
            assert session.scalars(select(Worker.stats)).all() == [{"calls": 1}]
        assert run._beat().stats["calls"] == 1, "until its units are given back"
        run._retire()
    assert sqlite_world.units(batch)[0].crash_count == (0 if is_suspect else 1)
    assert sqlite_world.batch(batch).crash_times is None, "the brake counts neither"
