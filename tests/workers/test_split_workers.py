"""Workers in halves: a unit stays its decode worker's; whichever half is killed, a line is answered and billed once.

Rows 85 to 87 of the fault matrix: no prefill worker, a prefill worker killed, a decode worker killed. The engines are
real ones, which pass blocks on, so the judge is the one of workers' tests and not that of the fake engine's.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from sqlalchemy import select, update

from batchsvc.batches import prefill_queries, worker_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import PrefillEngine
from batchsvc.errors import UnavailableError
from batchsvc.interactive.wire import ready_of
from batchsvc.settings import Settings, SettingsError
from engine.request import StepOutput
from tests.workers.conftest import World
from tests.workers.test_processes import environment, holds, process, until
from workers.call_lines import CallLines
from workers.context import open_engine_run
from workers.interactive import CallSource
from workers.pump import Pump
from workers.split import WAITS, PrefillDirectory, PrefillRun, Waiting, check_role, split_key

STEM = tuple(range(10, 60))
KEY = "0123456789abcdef" * 2
Env = Callable[..., dict[str, str]]


@pytest.fixture
def env(sqlite_world: World, tiny: tuple[Path, str], tmp_path: Path, redis_url: str) -> Env:
    return env_of(sqlite_world, tiny, tmp_path, redis_url)


@pytest.fixture
def each_env(world: World, tiny: tuple[Path, str], tmp_path: Path, redis_url: str) -> Env:
    """On both databases."""
    return env_of(world, tiny, tmp_path, redis_url)


def env_of(world: World, tiny: tuple[Path, str], tmp_path: Path, redis_url: str) -> Env:
    redis.Redis.from_url(redis_url).flushall()

    def of(role: str, **changes: object) -> dict[str, str]:
        more: dict[str, object] = {
            "BATCHSVC_ROLE": role,
            "BATCHSVC_ENGINE": "auto",
            "BATCHSVC_WEIGHT_FORMAT": "int8",
            "BATCHSVC_KV_FORMAT": "bf16",
            "BATCHSVC_THREADS": 1,
            "BATCHSVC_KV_BYTES": 1 << 22,
            "TEST_LOGS": tmp_path,
            "BATCHSVC_SPLIT_LISTEN": f"shm://{tmp_path}/prefill.sock",
            "BATCHSVC_SPLIT_KEY": KEY,
        }
        return environment(world.settings, tiny[0], **{**more, **changes})

    return of


def notes(world: World) -> list[str]:
    with world.db.reading() as session:
        return list(worker_queries.notes(session, 0).values())


def has_prefill(world: World, digest: str) -> bool:
    with world.db.reading() as session:
        return bool(prefill_queries.addresses(session, digest, 6))


def answers(world: World, batch_id: str) -> list[Any]:
    return [line["response"]["body"]["choices"] for line in world.result(batch_id, "output")]


def test_an_unknown_role_is_refused_in_a_sentence(env: Env) -> None:
    with pytest.raises(SettingsError, match=r"^BATCHSVC_ROLE .*'unified', 'prefill' or 'decode'.*\.$"):
        Settings.from_env(env("oracle"))


def test_half_a_fake_engine_is_refused_in_a_sentence(env: Env) -> None:
    with pytest.raises(UnavailableError, match="BATCHSVC_ROLE=decode needs an engine with weights"):
        check_role(Settings.from_env(env("decode", BATCHSVC_ENGINE="fake")))
    check_role(Settings.from_env(env("unified", BATCHSVC_ENGINE="fake")))
    check_role(Settings.from_env(env("decode")))


def test_a_prefill_worker_that_other_hosts_reach_needs_a_key(env: Env, tmp_path: Path) -> None:
    beyond = {"BATCHSVC_SPLIT_LISTEN": "gloo://192.0.2.1:4100", "BATCHSVC_SPLIT_KEY": ""}
    with pytest.raises(
        UnavailableError, match=r"^BATCHSVC_SPLIT_LISTEN: gloo://.*the same BATCHSVC_SPLIT_KEY, as .*\.$"
    ):
        check_role(Settings.from_env(env("prefill", **beyond)))
    for role in ("decode", "unified"):
        check_role(Settings.from_env(env(role, **beyond)))
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    for keys in ({"BATCHSVC_SPLIT_KEY": KEY}, {"BATCHSVC_SPLIT_KEY_FILE": path}):
        settings = Settings.from_env(env("prefill", **{**beyond, **keys}))
        check_role(settings)
        assert split_key(settings).secret == KEY.encode()
    with pytest.raises(SettingsError, match=r"^BATCHSVC_SPLIT_KEY can't be used.*\.$") as refused:
        Settings.from_env(env("prefill", BATCHSVC_SPLIT_KEY="hunter2"))
    assert "hunter2" not in refused.value.message


def test_a_prefill_worker_is_found_as_long_as_it_lives(sqlite_world: World) -> None:
    db = sqlite_world.db
    found = PrefillDirectory(db, "model")
    assert found.addresses() == []
    for name, digest in (("a", "model"), ("b", "model"), ("c", "other")):
        db.run(lambda session, name=name, digest=digest: prefill_queries.beat(session, name, digest, f"shm:///{name}"))
    assert found.addresses() == ["shm:///a", "shm:///b"]
    with db.transaction() as session:
        session.execute(
            update(PrefillEngine).where(PrefillEngine.id == "a").values(beat_ms=PrefillEngine.beat_ms - 7000)
        )
    assert found.addresses() == ["shm:///b"], "it was silent for too long"
    db.run(lambda session: prefill_queries.beat(session, "a", "model", "shm:///moved"))
    assert found.addresses() == ["shm:///moved", "shm:///b"]
    db.run(lambda session: prefill_queries.retire(session, "b"))
    assert found.addresses() == ["shm:///moved"]
    with db.transaction() as session:
        session.execute(update(PrefillEngine).values(beat_ms=0))
    db.run(lambda session: prefill_queries.beat(session, "d", "model", "shm:///d"))
    with db.reading() as session:
        assert list(session.scalars(select(PrefillEngine.id))) == ["d"], "the dead are forgotten"


class Side:
    """What a decode worker asks of its engine."""

    has_peer = False

    def is_ready(self) -> bool:
        return self.has_peer

    def note(self) -> str | None:
        return "No prefill engine is connected: shm:///secret/path: nobody listens."


def test_what_a_worker_waits_for_names_no_addresses() -> None:
    side = Side()
    waiting = Waiting(side)
    assert waiting.note() == WAITS
    assert "shm" not in WAITS
    side.has_peer = True
    assert waiting.note() is None


class Moving:
    """What the guard of a prefill worker reads of its engine."""

    address, hung_s, moved_s = "shm:///p", 3.0, 10.0


def test_a_prefill_engine_that_hangs_ends_its_worker(sqlite_world: World) -> None:
    said: list[str] = []
    side: Any = Moving()
    run = PrefillRun(sqlite_world.db, side, digest="model", owner="p", on_hang=said.append)
    run.look_for_a_hang(1.0)
    run.look_for_a_hang(100.0)  # the process was paused, not hung
    side.moved_s = 12.0
    for _ in range(3):
        run.look_for_a_hang(1.0)
    assert not said
    run.look_for_a_hang(1.0)
    assert said == ["The engine hangs: it computed nothing for 3 s while it had prompts."]


class Waits:
    """An engine whose steps only wait, for ten seconds each by its own account."""

    def __init__(self) -> None:
        self.waited = threading.Event()
        self.num_steps = 0

    def has_work(self) -> bool:
        return self.num_steps < 2

    def step(self) -> StepOutput:
        self.num_steps += 1
        self.waited.set()
        return StepOutput(idle_s=10.0)


def test_a_worker_that_waits_for_its_peer_is_not_busy() -> None:
    engine: Any = Waits()
    pump = Pump(engine, waiting_requests=1)
    pump.start()
    assert engine.waited.wait(30)
    pump.stop()
    assert pump.busy_s <= 0


def test_a_worker_that_can_not_begin_takes_no_calls_and_gives_no_sign(redis_url: str) -> None:
    may = [False]
    engine: Any = None
    calls = CallSource(engine=engine, owner="w", most_calls=2, may_take=lambda: may[0])
    lines = CallLines(redis_url, calls, digest="split", owner="w", on_crash=lambda error: None)
    client = redis.Redis.from_url(redis_url)
    client.delete(ready_of("split"))
    lines._beat()
    assert (calls.room(), client.get(ready_of("split"))) == (0, None)
    may[0] = True
    lines._beat()
    assert (calls.room(), client.get(ready_of("split"))) == (2, b"w")


@pytest.mark.parametrize(("role", "may_claim"), [("decode", False), ("unified", True)])
def test_a_decode_worker_alone_has_no_room(
    sqlite_world: World, tiny: tuple[Path, str], role: str, may_claim: bool
) -> None:
    changes = {"model": str(tiny[0]), "role": role, "engine": "auto", "threads": 1, "kv_bytes": 1 << 22}
    formats = {"weight_format": "int8", "kv_format": "bf16"}
    run = open_engine_run(sqlite_world.settings.model_copy(update={**changes, **formats}))
    run._units._room = 1
    assert run._units.has_room() == may_claim
    assert (run._calls.room() > 0) == may_claim
    run._ordered("a theft")
    assert run._beat().stats["note"] == (None if may_claim else WAITS), "tenants read it: an operator's reason isn't in"
    assert "is drained (a theft): `batchsvc workers undrain " in str(run.trouble())
    run._engine.close()
    run._dispatcher.close()


@pytest.mark.faults
def test_rows_85_to_87_units_wait_for_a_prefill_worker_and_outlive_both_halves(
    world: World, each_env: Env, tiny: tuple[Path, str]
) -> None:
    env, digest = each_env, tiny[1]
    world.stem = STEM
    batch_id = world.add_batch(num_lines=240, unit_lines=20, max_tokens=96, digest=digest)
    with ExitStack() as stack:
        stack.enter_context(process("control", env("unified")))
        decode = stack.enter_context(process("engine", env("decode")))
        until(lambda: notes(world) == [WAITS], "the decode worker says what it waits for")
        assert all(unit.state == "ready" for unit in world.units(batch_id)), "units wait"
        prefill = stack.enter_context(process("engine", env("prefill")))
        until(lambda: world.batch(batch_id).completed > 10, "the first parts")
        assert has_prefill(world, digest)
        assert not notes(world)
        is_held_and_unfinished(world, batch_id, decode)
        prefill.kill()
        prefill.wait()
        is_held_and_unfinished(world, batch_id, decode)
        stack.enter_context(process("engine", env("prefill")))
        before = world.batch(batch_id).completed
        until(lambda: world.batch(batch_id).completed > before + 10, "it goes on with another one")
        is_held_and_unfinished(world, batch_id, decode)
        decode.kill()
        decode.wait()
        is_held_and_unfinished(world, batch_id, decode)  # by the dead, until its leases end
        epochs = {unit.id: unit.epoch for unit in world.units(batch_id) if unit.state == "leased"}
        stack.enter_context(process("engine", env("decode")))
        until(lambda: world.batch(batch_id).status == Status.COMPLETED, "the end of the batch")
    world.judge(batch_id, Status.COMPLETED)
    assert len(answers(world, batch_id)) == 240
    assert all(unit.epoch > epochs[unit.id] for unit in world.units(batch_id) if unit.id in epochs), "claimed anew"


def is_held_and_unfinished(world: World, batch_id: str, decode: subprocess.Popen[str]) -> None:
    """Else the kill that follows, or came before, shows nothing."""
    batch = world.batch(batch_id)
    assert batch.status == Status.IN_PROGRESS, f"{batch.completed} of {batch.total} lines are done: too few for a kill"
    assert holds(world, batch_id, decode)


@pytest.mark.slow
def test_the_halves_answer_as_one(sqlite_world: World, env: Env, tiny: tuple[Path, str]) -> None:
    world, digest = sqlite_world, tiny[1]
    world.stem, world.params = STEM, {"temperature": 0.8, "seed": 3}
    first = world.add_batch(num_lines=40, unit_lines=10, max_tokens=12, digest=digest)
    with process("control", env("unified")):
        with process("engine", env("unified")):
            until(lambda: world.batch(first).status == Status.COMPLETED, "one worker's batch")
        second = world.add_batch(num_lines=40, unit_lines=10, max_tokens=12, digest=digest)
        with process("engine", env("prefill")), process("engine", env("decode")):
            until(lambda: world.batch(second).status == Status.COMPLETED, "two workers' batch")
    world.judge(second, Status.COMPLETED)
    assert answers(world, first) == answers(world, second)
