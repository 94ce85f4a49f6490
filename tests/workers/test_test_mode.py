"""The worker of test mode begins with the first test key, goes on after a failure, and ends at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy.exc import OperationalError

from batchsvc import mode
from batchsvc.accounts import service as accounts
from batchsvc.batches import worker_queries
from tests.workers.conftest import World, tenant_of
from workers import test_mode

LIVENESS_S = 60.0


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline, f"never saw: {what}"
        time.sleep(0.05)


@pytest.fixture
def served(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[test_mode.TestMode]:
    """It would let running lines end for ten minutes."""
    monkeypatch.setattr(test_mode, "_LOOK_S", 0.1)
    numbers = itertools.count()
    settings = world.settings.model_copy(update={"term_grace_s": 600})
    running = test_mode.TestMode(settings, lambda: f"host:1:{next(numbers)}")
    running.start()
    yield running
    running.stop()


def make_twin(world: World) -> str:
    with world.db.transaction() as session:
        return accounts.test_twin(session, tenant_of(session, "tests")).id


def batch_of(world: World, project: str, magic: str = "", lines: int = 6) -> str:
    world.params = {"temperature": 0.0, **({"magic": magic} if magic else {})}
    return world.add_batch(num_lines=lines, unit_lines=3, project=project, digest=mode.DIGEST)


def test_it_runs_nothing_before_there_is_a_test_key_and_then_what_waits(
    world: World, served: test_mode.TestMode
) -> None:
    early = batch_of(world, "tests")  # even a live project's, had it this digest: there is no worker at all
    time.sleep(0.5)
    assert world.batch(early).completed == 0
    twin = make_twin(world)
    batch_id = batch_of(world, twin)
    until(lambda: world.batch(batch_id).completed == 6, "the lines of the test key")


def test_one_that_failed_is_followed_by_another(world: World, served: test_mode.TestMode) -> None:
    twin = make_twin(world)
    batch_id = batch_of(world, twin)
    until(lambda: world.batch(batch_id).completed == 6, "the first batch")
    first = served._run
    assert first is not None
    first.crashed(RuntimeError("a defect"))
    until(lambda: served._run not in (None, first), "another worker")
    second = batch_of(world, twin)
    until(lambda: world.batch(second).completed == 6, "the second batch")


def test_a_start_that_fails_is_tried_again(
    world: World, served: test_mode.TestMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database goes away just as the worker registers."""

    def away(*_: object) -> None:
        raise OperationalError("insert", {}, Exception("away"))

    with monkeypatch.context() as broken:
        broken.setattr(worker_queries, "register", away)
        twin = make_twin(world)
        until(served.trouble, "what is in the way")
        assert "OperationalError" in (served.trouble() or "")
    batch_id = batch_of(world, twin)
    until(lambda: world.batch(batch_id).completed == 6, "the lines of the test key")
    assert served.trouble() is None


def test_it_ends_without_waiting_for_a_line_that_sleeps(world: World, served: test_mode.TestMode) -> None:
    batch_id = batch_of(world, make_twin(world), "test:slow 3000")
    until(lambda: any(unit.state == "leased" for unit in world.units(batch_id)), "a lease")
    served.stop()  # else this test would take the ten minutes
    assert {unit.state for unit in world.units(batch_id)} == {"ready"}
