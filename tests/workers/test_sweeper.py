"""The sweeper: purges go on while something is due, end when the store is away, and what is late is told of."""

from __future__ import annotations

from typing import Any

import pytest
import structlog
from sqlalchemy import update

from batchsvc.errors import UnavailableError
from batchsvc.files import purge_queries
from batchsvc.files.retention import Kind
from batchsvc.files.tables import Purge
from batchsvc.store import keys
from batchsvc.store.s3 import OBJECTS_KEPT
from tests.dispatchers import NullDispatcher
from tests.workers.conftest import World
from tests.workers.test_purge import add_input, delete_file, purger, set_back, stored
from workers.reaper import Reaper


def test_the_reaper_tells_of_deletions_that_are_overdue(sqlite_world: World) -> None:
    """A failed step of a tick is counted, and that is what the alert goes by."""
    world = sqlite_world
    file = add_input(world)
    delete_file(world, file.id)
    nothing: Any = NullDispatcher()
    steps: Any = dict.fromkeys(("plan", "finalize", "quote"), lambda _: None)
    reaper = Reaper(world.settings, world.db, world.store, nothing, **steps)
    with world.db.transaction() as session:
        session.execute(update(Purge).values(deleted_ms=1, due_ms=10**15))
    for _ in range(2):
        with structlog.testing.capture_logs() as logged:
            reaper.tick()
        assert "purges" in [entry.get("step") for entry in logged if entry["event"] == "reaper.failed"]
    set_back(world, 0)
    with structlog.testing.capture_logs() as logged:
        reaper.sweep()
        reaper.tick()
    assert not [entry for entry in logged if entry["event"] == "reaper.failed"]
    assert file.s3_key not in stored(world)


def test_a_round_ends_when_the_store_is_away(world: World) -> None:
    made = [add_input(world) for _ in range(3)]
    for file in made:
        delete_file(world, file.id)
    set_back(world, 10**9)
    tries: list[object] = []
    says = {"code": "store_unavailable"}

    def silent(keys_: object) -> None:
        tries.append(keys_)
        raise UnavailableError("The object store says no.", **says)

    delete, world.store.delete = world.store.delete, silent  # type: ignore[method-assign]
    away = purger(world)
    assert away.purge_due() == 0 and len(tries) == 1 and not away.is_behind
    assert away.purge_due() == 0 and len(tries) == 2, "those that it didn't come to are due at once"
    set_back(world, 0)
    says["code"] = OBJECTS_KEPT
    assert away.purge_due() == 0 and len(tries) == 5, "a lock on some objects is no outage"
    world.store.delete = delete  # type: ignore[method-assign]
    set_back(world, 0)
    assert away.purge_due() == 3 and not away.is_behind


def test_new_deletions_pass_a_backlog_and_rounds_go_on_till_nothing_is_due(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.purge._AT_ONCE", 2)
    old, new = ([add_input(world) for _ in range(count)] for count in (3, 1))
    for file in old + new:
        delete_file(world, file.id)
    set_back(world, 10**9)
    with world.db.transaction() as session:
        session.execute(update(Purge).where(Purge.subject_id.in_([file.id for file in old])).values(is_backlog=True))
        session.execute(update(Purge).where(Purge.subject_id == new[0].id).values(due_ms=9))
    here = purger(world)
    assert here.purge_due() == 2 and here.is_behind
    with world.db.reading() as session:
        assert purge_queries.purged_ms(session, Kind.FILE, new[0].id) is not None
    nothing: Any = NullDispatcher()
    steps: Any = dict.fromkeys(("plan", "finalize", "quote"), lambda _: None)
    Reaper(world.settings, world.db, world.store, nothing, **steps).sweep()
    assert stored(world, keys.INPUTS) == set()
