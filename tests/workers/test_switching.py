"""One real engine process that serves two models in turn: under one pid, back to what it had if it must, and it ends
when it is told to, also while it changes over. The engine is the fake one; tests/e2e has the real one."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from batchsvc.batches import models, switch_queries, worker_service
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Model, Worker
from batchsvc.settings import Settings
from engine.errors import DeviceError
from engine.load.meta import read_meta
from tests.tiny import make_tiny_model
from tests.workers.conftest import World, open_world
from tests.workers.test_processes import environment, process, until
from workers import context
from workers.switching import BATON, Baton, LineUp, NotLoadedError, OwnModel, own_models, taken


@pytest.fixture
def world(sqlite_settings: Settings, migrated_sqlite: Path) -> Iterator[World]:
    shutil.copy(migrated_sqlite, sqlite_settings.database_url.removeprefix("sqlite:///"))
    yield from open_world(sqlite_settings)


@pytest.fixture
def other(tmp_path: Path) -> tuple[Path, str]:
    """Another tiny model and its digest."""
    path = make_tiny_model(tmp_path / "other", seed=3)
    return path, read_meta(path).digest


@pytest.fixture
def env(world: World, tiny: tuple[Path, str], other: tuple[Path, str], tmp_path: Path) -> dict[str, str]:
    """An engine of the first model in a hurry: every swap is said to have taken half a second."""
    with world.db.transaction() as session:
        for name, (path, digest) in (("tiny", tiny), ("other", other)):
            models.register(session, name, str(path), digest=digest, context_tokens=512)
    hurry(world)
    return environment(world.settings, tiny[0], TEST_LOGS=tmp_path, BATCHSVC_POLL_S=0.2, BATCHSVC_WORKER_NAME="one")


def hurry(world: World) -> None:
    with world.db.transaction() as session:
        session.execute(update(Model).values(swap_ms=500))


def serving(world: World) -> set[str]:
    """The digests that workers serve at this moment."""
    with world.db.reading() as session:
        ready = select(Worker.model_digest).where(Worker.switching_to.is_(None), Worker.is_draining.is_(False))
        return set(session.scalars(ready))


def done(world: World, batch_id: str) -> bool:
    batch = world.batch(batch_id)
    return batch.completed == batch.total


@pytest.mark.slow  # CI has it on a whole stack: tests/e2e/test_incidents.py
def test_two_models_in_turn_under_one_pid(
    world: World, env: dict[str, str], tiny: tuple[Path, str], other: tuple[Path, str]
) -> None:
    first, second = (world.add_batch(num_lines=8, unit_lines=4, digest=digest) for digest in (tiny[1], other[1]))
    with process("engine", env | {"BATCHSVC_MODELS": str(other[0])}) as engine:
        until(lambda: done(world, first) and done(world, second), "both batches, by one worker")
        until(lambda: bool(serving(world)), "it says what it serves")
        with world.db.reading() as session:
            (shown,) = worker_service.shown_workers(session, 5)["data"]
            swaps = {row.digest: row.swap_ms for row in session.scalars(select(Model))}
        assert (shown["name"], shown["state"], set(shown["models"])) == ("one", "serving", {"tiny", "other"})
        assert shown["id"].split(":")[1] == str(engine.pid), "supervisors see one process that goes on"
        measured = [swap for swap in swaps.values() if swap not in (None, 500)]
        assert measured, "what the swap took was measured"
        third = world.add_batch(num_lines=4, digest=tiny[1])
        hurry(world)
        until(lambda: done(world, third), "and back again")
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(20) == 0
    with world.db.reading() as session:
        assert session.scalars(select(Worker.id)).all() == [], "no row is left of any of its lives"


def test_a_model_that_cant_be_loaded_isnt_tried_for_a_while(
    world: World, env: dict[str, str], tiny: tuple[Path, str], other: tuple[Path, str]
) -> None:
    with world.db.transaction() as session:
        switch_queries.order(session, "one", other[1], is_loaded=True)
    shutil.rmtree(other[0])
    world.add_batch(num_lines=4, digest=other[1])
    with process("engine", env) as engine:
        until(lambda: _problems(world) != [], "it says what it can't load")
        assert "There is no model" in _problems(world)[0]
        batch_id = world.add_batch(num_lines=4, digest=tiny[1])
        until(lambda: done(world, batch_id), "it serves what it had")
        assert engine.poll() is None and serving(world) == {tiny[1]}


def _problems(world: World) -> list[str]:
    with world.db.reading() as session:
        return [says for row in worker_service.shown_workers(session, 60)["data"] for says in row["problems"]]


@pytest.mark.slow
def test_a_signal_ends_it_also_while_it_changes_over(
    world: World, env: dict[str, str], tiny: tuple[Path, str], other: tuple[Path, str]
) -> None:
    world.add_batch(num_lines=4, digest=other[1])
    with process("engine", env | {"BATCHSVC_MODELS": str(other[0])}) as engine:
        until(lambda: bool(serving(world)), "it is ready")
        world.add_batch(num_lines=4, digest=tiny[1])
        with world.db.reading() as session:
            current = session.scalars(select(Worker.model_digest)).one()
        until(lambda: _changes_over(world, current), "it changes over")
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(20) in (0, -signal.SIGTERM)
    assert not [unit for batch in _batches(world) for unit in world.units(batch) if unit.state == "leased"]


def _changes_over(world: World, current: str) -> bool:
    hurry(world)
    with world.db.reading() as session:
        rows = session.scalars(select(Worker)).all()
        return any(row.switching_to not in (None, current) for row in rows)


def _batches(world: World) -> list[str]:
    from batchsvc.batches.tables import Batch

    with world.db.reading() as session:
        return list(session.scalars(select(Batch.id).where(Batch.status == Status.IN_PROGRESS)))


def test_a_baton_says_all_and_no_child_inherits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import json
    import os
    from dataclasses import asdict

    own = (OwnModel("a" * 64, "/a"), OwnModel("b" * 64, "hf:b"))
    baton = Baton(own=own, digest=own[1].digest, source="hf:b", back=own[0], before="h:1:x", began_s=1.5)
    monkeypatch.setenv(BATON, json.dumps(asdict(baton)))
    assert taken() == baton and BATON not in os.environ and taken() is None
    back = baton.returned("It is broken.")
    assert back is not None and (back.digest, back.back) == (own[0].digest, None)
    assert back.began_s > baton.began_s, "the swap back is timed by itself, else a model counts as slow for ever"
    assert back.refused[own[1].digest][0] == "It is broken." and back.returned("so is that") is None
    line_up = LineUp("one", own, back.refused)
    assert line_up.digests() == (own[0].digest,) and line_up.problems() == ["It is broken."]
    assert line_up.find("c" * 64) is None, "its name was given to other weights"


@pytest.mark.parametrize("error", [RuntimeError("what it holds"), DeviceError("It doesn't fit.")])
def test_whatever_fails_a_load_another_model_is_served(
    world: World, tiny: tuple[Path, str], other: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_arguments: Any, **_named: Any) -> None:
        raise error

    monkeypatch.setattr(context, "_open_run", fail)
    alone = world.settings.model_copy(update={"model": str(tiny[0]), "engine": "fake"})
    with pytest.raises(type(error)):
        context.open_engine_run(alone)
    both = alone.model_copy(update={"models": str(other[0])})
    with pytest.raises(NotLoadedError) as refused:
        context.open_engine_run(both)
    back = refused.value.back
    assert (back.digest, set(back.refused)) == (other[1], {tiny[1]})
    says = back.refused[tiny[1]][0]
    assert says == "It doesn't fit." or ("(RuntimeError)" in says and "what it holds" not in says)
    with pytest.raises(type(error)):  # that one can't be loaded either: there is nothing left
        context.open_engine_run(both, back)


@pytest.mark.parametrize(
    ("spec", "draft", "others"),
    [
        ("heads", None, "auto"),
        ("heads", "d", "auto"),
        ("draft", "d", "auto"),
        ("auto", "d", "auto"),
        ("off", "d", "off"),
    ],
)
def test_what_drafts_for_the_first_model_is_nothing_to_another(
    world: World,
    tiny: tuple[Path, str],
    other: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    draft: str | None,
    others: str,
) -> None:
    """Its own heads may draft for it, or look-up."""
    opened: list[Settings] = []

    def fail(settings: Settings, *_arguments: Any, **_named: Any) -> None:
        opened.append(settings)
        raise DeviceError("It doesn't fit.")

    monkeypatch.setattr(context, "_open_run", fail)
    changes = {"model": str(tiny[0]), "models": str(other[0]), "engine": "fake", "spec": spec, "draft": draft}
    own = (OwnModel(tiny[1], str(tiny[0])), OwnModel(other[1], str(other[0])))
    settings = world.settings.model_copy(update=changes)
    for model in own:
        baton = Baton(own=own, digest=model.digest, source=model.source)
        with pytest.raises(NotLoadedError):
            context.open_engine_run(settings, baton)
    assert [(one.spec, one.draft) for one in opened] == [(spec, draft), (others, None)]


_HANDS_ON = """
import os, signal, sys, threading, time
from workers import switching
if switching.BATON in os.environ:
    sys.exit(0)
said = []
signal.signal(signal.SIGTERM, lambda *_: said.append(1))
threading.Thread(target=time.sleep, args=(9,), daemon=True).start()  # it takes what the main thread keeps off
def unless():
    found = bool(said)
    os.kill(os.getpid(), signal.SIGTERM)  # at the last moment
    return found
switching.hand_on(switching.Baton(own=(), digest="d", source="s"), unless=unless)
"""


def test_no_signal_is_lost_between_drain_and_start() -> None:
    done = subprocess.run([sys.executable, "-c", _HANDS_ON], timeout=60, check=False)
    assert done.returncode == -signal.SIGTERM, "it ended, rather than become the next start"


def test_the_same_model_twice_is_one(tiny: tuple[Path, str]) -> None:
    assert own_models([str(tiny[0]), f"{tiny[0]}/"]) == (OwnModel(tiny[1], str(tiny[0])),)
