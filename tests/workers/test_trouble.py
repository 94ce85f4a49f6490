"""A worker in trouble: its engine hangs, fails or runs out of memory, its store or its database is away."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from batchsvc.batches import unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.errors import UnavailableError
from batchsvc.store.s3 import ObjectStore
from engine.fake import FakeEngine
from engine.faults import Faults
from tests.workers.conftest import World
from tests.workers.test_engine_run import completed, finalized, until, worker
from workers.breaker import Breaker

LONG = {"temperature": 0.0, "ignore_eos": True}


def test_an_engine_that_hangs_is_a_crash_and_its_tokens_are_kept(sqlite_world: World) -> None:
    world = sqlite_world
    world.params = LONG
    batch_id = world.add_batch(num_lines=6, unit_lines=3, max_tokens=100)
    with worker(world, FakeEngine(None, step_tokens=20, faults=Faults.parse("hang:200")), hung_s=0.5) as run:
        until(lambda: run.failure is not None, "the hang is noticed")
        assert (run.failure or "").startswith("The engine hangs: it gave no token for 0.5 s while it had ")
        run.drain()
    units = world.units(batch_id)
    assert {unit.state for unit in units} == {"ready"}
    assert all(unit.is_suspect or unit.crash_count == 1 for unit in units), "units freed as crashed"
    assert sum(unit.running_tokens for unit in units) >= 160, "all but the step that never returned"
    with worker(world, name="next"):
        until(completed(world, batch_id), "all lines")
    finalized(world, batch_id, Status.COMPLETED)


def test_an_engine_at_work_or_idle_does_not_hang(sqlite_world: World) -> None:
    world = sqlite_world
    world.params = LONG
    with worker(world, FakeEngine(None, tokens_per_s=40), hung_s=0.6) as run:
        time.sleep(1.2)  # idle for longer than that
        batch_id = world.add_batch(num_lines=2, unit_lines=2, max_tokens=40)
        until(completed(world, batch_id), "all lines")
        assert run.failure is None


def test_a_shortage_of_memory_costs_no_line_and_no_attempt(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=40, unit_lines=10, max_tokens=20)
    engine = FakeEngine(None, max_running=16, step_tokens=32, faults=Faults.parse("oom:3"))
    with worker(world, engine, lease_s=300.0) as run:  # a busy machine loses no lease
        until(completed(world, batch_id), "all lines")
        assert run._engine.stats().shortages >= 2 and run.failure is None
    assert {unit.epoch for unit in world.units(batch_id)} == {1}
    assert {unit.crash_count for unit in world.units(batch_id)} == {0}
    finalized(world, batch_id, Status.COMPLETED)


def test_a_line_that_the_engine_fails_ends_as_an_error_after_its_attempts(world: World) -> None:
    """The prompt of line n holds token 4 + n % 50."""
    batch_id = world.add_batch(num_lines=12, unit_lines=6, max_tokens=6)
    with worker(world, FakeEngine(None, faults=Faults.parse("nan:9")), lease_s=300.0):  # a busy machine loses no lease
        until(completed(world, batch_id), "all lines")
    finalized(world, batch_id, Status.COMPLETED)
    assert (world.batch(batch_id).completed, world.batch(batch_id).failed) == (11, 1)
    (line,) = world.result(batch_id, "error")
    assert line["line"] == 5 and line["response"]["body"]["error"]["code"] == "invalid_logits"
    hurt, fine = sorted(world.units(batch_id), key=lambda unit: -unit.epoch)
    assert (hurt.epoch, fine.epoch) == (3, 1), "three attempts, and nobody else's"
    assert hurt.crash_count == 0


def test_units_are_neither_claimed_nor_given_back_while_the_store_does_not_answer(sqlite_world: World) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=24, unit_lines=4)
    away = [True]

    class Away(ObjectStore):
        def get(self, key: str) -> bytes:
            if away[0]:
                raise UnavailableError("The object store doesn't answer.")
            return super().get(key)

        def head(self, key: str) -> Any:
            if away[0]:
                raise UnavailableError("The object store doesn't answer.")
            return super().head(key)

    with worker(world, store=Away(world.settings)) as run:
        until(lambda: run._breaker.is_failing("reads"), "the trouble is seen")
        time.sleep(1.5)
        epochs = [unit.epoch for unit in world.units(batch_id)]
        assert sum(epochs) <= 1, "one claim found out, and the others were spared"
        away[0] = False
        until(completed(world, batch_id), "it goes on alone")
    assert {unit.crash_count for unit in world.units(batch_id)} == {0}
    finalized(world, batch_id, Status.COMPLETED)


def test_a_database_that_is_away_stops_the_work_and_counts_no_crash(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sqlite_world
    world.params = LONG
    batch_id = world.add_batch(num_lines=8, unit_lines=4, max_tokens=300)
    engine = FakeEngine(None, tokens_per_s=400)
    with worker(world, engine, lease_s=1.5, renew_s=0.2, flush_s=0.2) as run:
        until(lambda: world.batch(batch_id).running_tokens > 0, "sequences are saved")
        away = {id(run._db): True, id(run._lease_db): True}
        real = type(run._db).transaction

        def transaction(self: Any) -> Any:
            if away.get(id(self)):
                raise OperationalError("BEGIN", {}, Exception("the database doesn't answer"))
            return real(self)

        monkeypatch.setattr(type(run._db), "transaction", transaction)
        until(lambda: run._units.num_live() == 0, "the units are given up")
        until(lambda: not engine.has_work(), "and their sequences aborted")
        assert run._breaker.is_open
        before = world.units(batch_id)
        away.clear()
        until(completed(world, batch_id), "it goes on alone")
        assert not run._breaker.is_open
    units = world.units(batch_id)
    assert {unit.crash_count for unit in units} == {0}, "no reaper was there, and nobody counted a crash"
    assert all(unit.epoch > old.epoch for unit, old in zip(units, before, strict=True))
    finalized(world, batch_id, Status.COMPLETED)


def test_renewals_need_no_connection_that_others_can_take(world: World) -> None:
    world.params = LONG
    batch_id = world.add_batch(num_lines=4, unit_lines=4, max_tokens=2_000)
    with worker(world, FakeEngine(None, tokens_per_s=200), flush_s=60) as run:
        until(lambda: run._units.num_live() == 1, "a claim")
        taken = [run._db.engine.connect() for _ in range(5 if run._db.is_sqlite else 15)]
        before = world.units(batch_id)[0].lease_ms
        until(lambda: world.units(batch_id)[0].lease_ms > before + 1_000, "two renewals")
        assert run._units.num_live() == 1
        for connection in taken:
            connection.close()


def test_a_renewal_that_hangs_does_not_keep_the_fence_from_falling(
    sqlite_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = sqlite_world
    world.params = LONG
    batch_id = world.add_batch(num_lines=4, unit_lines=4, max_tokens=2_000)
    go_on = threading.Event()
    engine = FakeEngine(None, tokens_per_s=200)
    with worker(world, engine, lease_s=0.9, renew_s=0.2, flush_s=60) as run:
        until(lambda: engine.stats().output_tokens > 0, "it runs")
        monkeypatch.setattr(run._leases, "_renew", lambda: go_on.wait(60) and None)
        run._units.is_draining = True
        until(lambda: run._units.num_live() == 0, "the unit is given up")
        until(lambda: not engine.has_work(), "its sequences are aborted")
        go_on.set()
    assert not world.parts(batch_id)


def test_a_unit_that_was_fenced_is_given_back_when_the_database_answers_again(sqlite_world: World) -> None:
    world = sqlite_world
    world.params = LONG
    batch_id = world.add_batch(num_lines=4, unit_lines=4, max_tokens=2_000)
    with worker(world, FakeEngine(None, tokens_per_s=200), lease_s=600, renew_s=0.2, flush_s=60) as run:
        until(lambda: run._units.num_live() == 1, "a claim")
        run._units.is_draining = True

        def is_fenced() -> bool:
            """Old proofs; once more if a renewal that was on its way made them new again."""
            with run._leases._lock:
                run._leases._proof_s = dict.fromkeys(run._leases._proof_s, -1e9)
            run._leases.fence()
            return run._leases.lost()["fenced"] > 0

        until(is_fenced, "it is fenced")
        until(lambda: world.units(batch_id)[0].state == "ready", "it is given back long before its lease is over")
        assert world.units(batch_id)[0].crash_count == 0
        assert run._units.num_live() == 0


def test_a_claim_that_comes_during_a_drain_is_given_back(sqlite_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    claiming, go_on = threading.Event(), threading.Event()
    real = unit_queries.claim

    def slow(*arguments: Any, **options: Any) -> Any:
        claimed = real(*arguments, **options)
        claiming.set()
        assert go_on.wait(60)
        return claimed

    monkeypatch.setattr(unit_queries, "claim", slow)
    with worker(world) as run:
        assert claiming.wait(60)
        run.signalled()
        run.signalled()
        threading.Timer(0.3, go_on.set).start()
        run.drain()
    (unit,) = world.units(batch_id)
    assert (unit.state, unit.num_done, unit.crash_count) == ("ready", 0, 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.sampled_from(["reads", "writes", "leases"]), st.booleans()), max_size=60))
def test_the_breaker_is_open_until_all_that_failed_has_worked(steps: list[tuple[Any, bool]]) -> None:
    clock = Clock()
    breaker = Breaker(clock, draw=lambda: 0.5)
    failing: dict[str, int] = {}
    for way, works in steps:
        if works:
            breaker.worked(way)
            failing.pop(way, None)
        else:
            failing[way] = failing.get(way, 0) + 1
            wait_s = breaker.failed(way)
            assert 0 < wait_s <= 5 and not breaker.may_try(way)
            clock.now_s += wait_s
        assert breaker.may_try(way)
        assert breaker.is_open == bool(failing)
        assert all(breaker.is_failing(name) == (name in failing) for name in ("reads", "writes", "leases"))


def test_the_breaker_waits_longer_each_time_and_never_in_step() -> None:
    breaker = Breaker(draw=lambda: 1.0)
    waits = [breaker.failed("writes") for _ in range(10)]
    assert waits == sorted(waits) and waits[0] == pytest.approx(0.4) and waits[-1] == 5.0
    assert len({Breaker().failed("writes") for _ in range(50)}) == 50


def test_the_end_status_of_a_worker_that_failed(sqlite_world: World) -> None:
    """An engine that dies with a batch cancelled leaves nothing leased either."""
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=4)
    with worker(world, FakeEngine(None, faults=Faults.parse("oom:0"))) as run:
        until(lambda: run.failure is not None, "memory never suffices")
        assert run.failure == "The engine worker stopped: MemoryShortageError: A step needs more memory than there is."
        world.set_batch(batch_id, status=Status.CANCELLING, cancelling_ms=1)
        run.drain()
    assert {unit.state for unit in world.units(batch_id)} == {"ready"}
