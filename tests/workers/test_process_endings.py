"""Real processes: every signal that asks a worker to end is a drain; kill -9 costs little of what was generated."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from batchsvc.batches.lifecycle import Status
from engine.load.meta import read_meta
from tests.tiny import make_tiny_model
from tests.workers.conftest import World
from tests.workers.test_processes import environment, holds, process, until
from tests.workers.test_unfinished import generated, same_as, undisturbed

LONG = {"temperature": 0.8, "ignore_eos": True, "seed": 5}


@pytest.fixture
def env(sqlite_world: World, tiny: tuple[Path, str], tmp_path: Path, redis_url: str) -> dict[str, str]:
    redis.Redis.from_url(redis_url).flushall()
    return environment(
        sqlite_world.settings,
        tiny[0],
        TEST_LOGS=tmp_path,
        BATCHSVC_FAKE_WITNESS=tmp_path / "witness",
        BATCHSVC_POLL_S=0.2,
    )


def leased(world: World, batch_id: str) -> list[str]:
    return [unit.owner or "" for unit in world.units(batch_id) if unit.state == "leased"]


def test_every_signal_drains_and_a_second_one_hurries(
    sqlite_world: World, env: dict[str, str], tiny: tuple[Path, str], tmp_path: Path
) -> None:
    """The lines take minutes: the grace of 30 s would be used up by the one that is signalled once."""
    world = sqlite_world
    world.params = LONG
    names = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")
    batch_id = world.add_batch(num_lines=8, unit_lines=2, max_tokens=20_000, digest=tiny[1])
    changes = {
        "BATCHSVC_TERM_GRACE_S": "60",
        "BATCHSVC_MAX_RUNNING": "2",
        "BATCHSVC_WAITING_REQUESTS": "1",
        "BATCHSVC_FAKE_TOKENS_PER_S": "100",
    }
    for name in names:
        with process("engine", env | changes) as engine:
            until(lambda engine=engine: holds(world, batch_id, engine), "a claim")
            before = generated(tmp_path / "witness")
            until(lambda before=before: generated(tmp_path / "witness") > before + 20, "some tokens")
            engine.send_signal(signal.Signals[name])
            time.sleep(0.5)
            assert engine.poll() is None and leased(world, batch_id), f"{name}: what runs goes on"
            began = time.monotonic()
            engine.send_signal(signal.Signals[name])
            assert engine.wait(50) == 0, f"{name}: it ends well"
            assert time.monotonic() - began < 40, "a second signal skips the waiting"
            assert not leased(world, batch_id), "leases are free at once"
    assert {unit.crash_count for unit in world.units(batch_id)} == {0}
    saved = sum(unit.running_tokens for unit in world.units(batch_id))
    assert saved == generated(tmp_path / "witness") > 0, "a drain loses no token"
    said = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "Traceback" not in said, said[-3000:]


def test_a_drain_that_hangs_ends_with_the_grace(
    sqlite_world: World, env: dict[str, str], tiny: tuple[Path, str]
) -> None:
    world = sqlite_world
    batch_id = world.add_batch(num_lines=4, unit_lines=2, digest=tiny[1])
    changes = {"BATCHSVC_TERM_GRACE_S": "3", "BATCHSVC_FAILPOINTS": "worker.draining=hang"}
    with process("engine", env | changes) as engine:
        until(lambda: world.batch(batch_id).completed == 4, "all lines")
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(120) == -signal.SIGALRM


def test_a_hung_engine_ends_its_process_with_a_sentence(
    sqlite_world: World, env: dict[str, str], tiny: tuple[Path, str], tmp_path: Path
) -> None:
    world = sqlite_world
    world.params = LONG
    batch_id = world.add_batch(num_lines=4, unit_lines=2, max_tokens=200, digest=tiny[1])
    with process("engine", env | {"BATCHSVC_FAKE_FAULTS": "hang:100", "BATCHSVC_HUNG_S": "1"}) as engine:
        assert engine.wait(90) == 1
    last = next(tmp_path.glob("engine-*.log")).read_text().strip().splitlines()[-1]
    assert last.startswith("The engine hangs: it gave no token for 1 s"), last
    assert not leased(world, batch_id) and any(unit.crash_count or unit.is_suspect for unit in world.units(batch_id))


def test_a_model_that_cannot_be_loaded_is_never_ready(
    sqlite_world: World, env: dict[str, str], tiny: tuple[Path, str], tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(tiny[0], cut)
    weights = next(cut.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    gone = tmp_path / "gone"
    shutil.copytree(tiny[0], gone)
    next(gone.glob("*.safetensors")).unlink()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    argv = [sys.executable, "-P", "-m", "workers", "engine"]
    base = env | {"BATCHSVC_ENGINE": "auto", "BATCHSVC_THREADS": "1", "BATCHSVC_LOG_LEVEL": "error"}
    children = [subprocess.Popen(argv, env=base | {"BATCHSVC_MODEL": str(model)}, **pipes) for model in (cut, gone)]
    for child in children:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 1 and len(err.strip().splitlines()) == 1 and err.strip().endswith("."), err
        assert not out
    with sqlite_world.db.reading() as session:
        assert session.connection().exec_driver_sql("select count(*) from workers").scalar() == 0


def kill_now_and_then(
    world: World, env: dict[str, str], batch_id: str, *, every_s: float, most_s: float, kills: int
) -> int:
    """Workers one after the other, each killed -9 `every_s` after it began to generate. Returns how many were."""
    witness, killed, deadline = Path(env["BATCHSVC_FAKE_WITNESS"]), 0, time.monotonic() + most_s
    while world.batch(batch_id).completed < world.batch(batch_id).total:
        assert time.monotonic() < deadline, "not within time"
        with process("engine", env) as engine:
            before = generated(witness) if witness.exists() else 0

            def has_begun(before: int = before) -> bool:
                return (witness.exists() and generated(witness) > before) or is_over(world, batch_id)

            until(has_begun, "it goes on")
            end = time.monotonic() + every_s
            while (time.monotonic() < end or killed == kills) and not is_over(world, batch_id):
                assert time.monotonic() < deadline, "not within time"
                time.sleep(0.05)
            if not is_over(world, batch_id):
                os.kill(engine.pid, signal.SIGKILL)
                engine.wait()
                killed += 1
    return killed


def is_over(world: World, batch_id: str) -> bool:
    return world.batch(batch_id).completed == world.batch(batch_id).total


def rerun(world: World, env: dict[str, str], tiny: tuple[Path, str], **how: float) -> tuple[int, float]:
    """Kills, and tokens generated over tokens delivered."""
    from engine.fake import FakeEngine
    from engine.text import load_text

    batch_id = world.add_batch(
        num_lines=int(how["lines"]), unit_lines=int(how["lines"]) // 2, max_tokens=int(how["tokens"]), digest=tiny[1]
    )
    with process("control", env):
        killed = kill_now_and_then(
            world, env, batch_id, every_s=how["every_s"], most_s=how["most_s"], kills=int(how["kills"])
        )
        until(lambda: world.batch(batch_id).status == Status.COMPLETED, "the end of the batch")
    world.judge(batch_id, Status.COMPLETED)
    same_as(world, batch_id, undisturbed(world, batch_id, FakeEngine(load_text(tiny[0]))))
    delivered = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in world.result(batch_id, "output"))
    assert delivered == how["lines"] * how["tokens"] == world.batch(batch_id).output_tokens
    ratio = generated(Path(env["BATCHSVC_FAKE_WITNESS"])) / delivered
    print(json.dumps({"kills": killed, "generated_over_delivered": round(ratio, 4)}))
    return killed, ratio


def test_after_kill_9_another_worker_goes_on(sqlite_world: World, env: dict[str, str], tiny: tuple[Path, str]) -> None:
    """A lower bound for the waste of starting anew would be 1.5; flushes come every 0.3 s."""
    sqlite_world.params = LONG
    env = env | {"BATCHSVC_FAKE_TOKENS_PER_S": "600", "BATCHSVC_MAX_RUNNING": "16"}
    killed, ratio = rerun(sqlite_world, env, tiny, lines=8, tokens=300, every_s=2.0, most_s=200, kills=1)
    assert killed == 1
    assert ratio < 1.45, "at most what was generated since the last flush is generated again"


@pytest.mark.slow
def test_killed_again_and_again_little_is_generated_twice(
    sqlite_world: World, env: dict[str, str], tmp_path: Path
) -> None:
    """64 lines of 2,000 tokens, kill -9 every 60 s, flushes every 5 s: all of it at six times the pace."""
    long_enough = make_tiny_model(tmp_path / "long", context_tokens=4_096)
    sqlite_world.params = LONG
    changes = {
        "BATCHSVC_MODEL": str(long_enough),
        "BATCHSVC_FAKE_TOKENS_PER_S": "2500",
        "BATCHSVC_MAX_RUNNING": "64",
        "BATCHSVC_WAITING_REQUESTS": "64",
        "BATCHSVC_FLUSH_S": str(5 / 6),
    }
    model = (long_enough, read_meta(long_enough).digest)
    killed, ratio = rerun(
        sqlite_world, env | changes, model, lines=64, tokens=2_000, every_s=10.0, most_s=280, kills=99
    )
    assert killed >= 3
    assert ratio < 1.1
