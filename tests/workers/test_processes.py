"""Real processes: `python -m workers control` and `engine`, killed and terminated, against a whole batch life."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis
from sqlalchemy import select

from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Worker
from batchsvc.settings import Settings
from tests.workers.conftest import World

LIVENESS_S = 60


def environment(settings: Settings, model: Path, **changes: object) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith(("BATCHSVC_", "AWS_"))}
    ours = {
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "AWS_ENDPOINT_URL_S3": settings.s3_endpoint,
        "AWS_ACCESS_KEY_ID": settings.s3_access_key,
        "AWS_SECRET_ACCESS_KEY": settings.s3_secret_key,
        "BATCHSVC_BUCKET": settings.bucket,
        "BATCHSVC_SECRET_KEY": settings.secret_key or "",
        "BATCHSVC_MODEL": model,
        "BATCHSVC_ENGINE": "fake",
        "BATCHSVC_FAKE_TOKENS_PER_S": 400,
        "BATCHSVC_MAX_RUNNING": 8,
        "BATCHSVC_WAITING_REQUESTS": 24,
        "BATCHSVC_LEASE_S": 3,
        "BATCHSVC_RENEW_S": 0.5,
        "BATCHSVC_REAPER_S": 0.5,
        "BATCHSVC_FLUSH_S": 0.3,
        "BATCHSVC_TERM_GRACE_S": 9,
        **changes,
    }
    return base | {name: str(value) for name, value in ours.items()}


@contextmanager
def process(role: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    log = Path(env["TEST_LOGS"]) / f"{role}-{secrets.token_hex(3)}.log"
    with log.open("w") as sink:
        child = subprocess.Popen([sys.executable, "-P", "-m", "workers", role], env=env, stderr=sink, text=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        says = log.read_text()
        print(f"--- {role} {child.pid} ended with {child.returncode}\n{says[-6000:]}")


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIVENESS_S} s: {what}"
        time.sleep(0.05)


def executions(witness: Path) -> Counter[str]:
    """How often each request of a unit began to run, whatever the epoch."""
    starts = [json.loads(line) for line in witness.read_text().splitlines() if line.endswith("}")]
    ids = [entry["id"].split(":") for entry in starts if entry["event"] == "start"]
    return Counter(f"{unit}:{row}" for unit, _, row in ids)


@pytest.fixture
def env(world: World, tiny: tuple[Path, str], tmp_path: Path, redis_url: str) -> dict[str, str]:
    redis.Redis.from_url(redis_url).flushall()
    return environment(world.settings, tiny[0], BATCHSVC_FAKE_WITNESS=tmp_path / "witness", TEST_LOGS=tmp_path)


def holds(world: World, batch_id: str, worker: subprocess.Popen[str]) -> bool:
    owners = {unit.owner for unit in world.units(batch_id) if unit.state == "leased"}
    return any(owner and f":{worker.pid}:" in owner for owner in owners)


def num_workers(world: World) -> int:
    with world.db.reading() as session:
        return len(session.scalars(select(Worker.id)).all())


@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_batch_survives_kills_a_drain_and_a_wiped_redis(
    world: World, env: dict[str, str], tiny: tuple[Path, str], redis_url: str
) -> None:
    batch_id = world.add_batch(num_lines=200, unit_lines=20, windows=2, fold=2, max_tokens=8, digest=tiny[1])
    with ExitStack() as stack:
        stack.enter_context(process("control", env))
        victim, drained = (stack.enter_context(process("engine", env)) for _ in range(2))
        until(lambda: holds(world, batch_id, victim) and world.batch(batch_id).completed > 20, "the first parts")
        victim.kill()  # -9, mid-batch
        redis.Redis.from_url(redis_url).flushall()
        stack.enter_context(process("engine", env))  # starts while the other goes on
        until(lambda: holds(world, batch_id, drained), "the second worker's units")
        drained.send_signal(signal.SIGTERM)
        assert drained.wait(20) == 0, "a drain ends well"
        assert not holds(world, batch_id, drained), "its leases are free at once"
        redis.Redis.from_url(redis_url).flushall()
        until(lambda: world.batch(batch_id).status == Status.COMPLETED, "the end of the batch")
    world.judge(batch_id, Status.COMPLETED)
    assert len(world.result(batch_id, "output")) == 400
    assert any(unit.epoch > 1 for unit in world.units(batch_id)), "what was interrupted was claimed again"
    most = max(executions(Path(env["BATCHSVC_FAKE_WITNESS"])).values())
    assert most <= 3, "nothing runs more often than it was interrupted"
    assert num_workers(world) <= 1, "only the killed worker's row is left, for the reaper"


@pytest.fixture
def quiet_env(sqlite_world: World, tiny: tuple[Path, str], tmp_path: Path, redis_url: str) -> dict[str, str]:
    redis.Redis.from_url(redis_url).flushall()
    return environment(sqlite_world.settings, tiny[0], TEST_LOGS=tmp_path, BATCHSVC_POLL_S=600)


def test_tickets_alone_feed_the_workers(sqlite_world: World, quiet_env: dict[str, str], tiny: tuple[Path, str]) -> None:
    """Polling is off here: every claim is a ticket's, sent by the reaper. The engine is the real one."""
    world, quiet_env = sqlite_world, quiet_env | {"BATCHSVC_ENGINE": "auto", "BATCHSVC_THREADS": "1"}
    batch_id = world.add_batch(num_lines=20, unit_lines=5, max_tokens=4, digest=tiny[1])
    with process("control", quiet_env), process("engine", quiet_env):
        until(lambda: world.batch(batch_id).status == Status.COMPLETED, "the end of the batch")
    world.judge(batch_id, Status.COMPLETED)


def test_a_batch_completes_without_redis(
    sqlite_world: World, quiet_env: dict[str, str], tiny: tuple[Path, str]
) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=24, unit_lines=6, max_tokens=4, digest=tiny[1])
    env = quiet_env | {"REDIS_URL": "redis://127.0.0.1:1/0", "BATCHSVC_POLL_S": "0.2"}
    with process("control", env), process("engine", env) as engine:
        until(lambda: world.batch(batch_id).status == Status.COMPLETED, "the end of the batch")
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(20) == 0
    world.judge(batch_id, Status.COMPLETED)


def test_a_worker_that_cannot_serve_says_so_in_one_sentence(quiet_env: dict[str, str]) -> None:
    cases = {
        "/nowhere/model": {"BATCHSVC_MODEL": "/nowhere/model"},
        "no-such-model": {"BATCHSVC_MODEL": "no-such-model"},
        "BATCHSVC_LEASE_S": {"BATCHSVC_LEASE_S": "soon"},
        "The database": {"DATABASE_URL": "postgresql://127.0.0.1:1/none"},
        "The object store": {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1"},
    }
    argv = [sys.executable, "-P", "-m", "workers", "engine"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = {says: subprocess.Popen(argv, env=quiet_env | env, **pipes) for says, env in cases.items()}
    for says, child in children.items():
        out, err = child.communicate(timeout=LIVENESS_S)
        sentences = [text for text in err.splitlines() if not text.startswith("{")]  # the rest are events of the log
        assert child.returncode == 1 and len(sentences) == 1 and says in sentences[0], err
        assert not out
