"""Three incidents, as an operator with README alone would handle them: by commands, on a stack with one engine worker
that serves two models in turn."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import func, select

from batchsvc.batches.tables import Model
from batchsvc.db.session import Database
from batchsvc.money import format_dollars
from batchsvc.stack.datadir import DataDir
from tests.e2e.conftest import BATCHSVC, LIVENESS_S, CommandLine, line, read_lines, wait_for, write_lines
from tests.tiny import make_tiny_model

VENOM = "venom"


class Ward:
    """A stack with one engine worker and two models, which ends engines at a word until it is mended."""

    def __init__(self, root: Path, models: tuple[str, str], env: dict[str, str], cli: CommandLine) -> None:
        self.first, self.second = models
        self._root, self._flags = root, ["--data-dir", str(root)]
        self._env = env
        self._cli = cli

    def up(self, **settings: str) -> None:
        models = ["--model", self.first, "--model", self.second, "--one-engine"]
        up = subprocess.run(
            [*BATCHSVC, "up", "--detach", "--port", "0", *models, *self._flags],
            env={**self._env, **settings},
            capture_output=True,
            text=True,
            timeout=LIVENESS_S,
            check=False,
        )
        assert up.returncode == 0, up.stderr

    def down(self) -> None:
        assert self._cli("down", *self._flags).code == 0

    def says(self, *arguments: object, code: int | None = 0) -> str:
        """What a command prints; `code` None: however it ends."""
        done = self._cli(*arguments, *self._flags)
        assert code in (None, done.code), done.out + done.err
        return done.out + done.err

    def num_measured_swaps(self) -> int:
        """Models of which it is known how long a change to them takes."""
        database = Database(DataDir(self._root).database_url)
        with database.reading() as session:
            found = session.scalar(select(func.count(Model.id)).where(Model.swap_ms > 0)) or 0
        database.dispose()
        return found

    def status(self) -> dict[str, Any]:
        """What `status --json` says."""
        found: dict[str, Any] = self._cli("status", "--json", *self._flags).json
        return found


@pytest.fixture
def ward(tmp_path: Path, stack_env: dict[str, str], cli: CommandLine) -> Iterator[Ward]:
    models = [str(make_tiny_model(tmp_path / name, seed=seed)) for seed, name in enumerate(("one", "two"))]
    made = Ward(DataDir(tmp_path / "data").root, (models[0], models[1]), stack_env, cli)
    yield made
    made.down()


def test_three_incidents_by_the_readme(ward: Ward, tmp_path: Path) -> None:
    ward.up(BATCHSVC_FAKE_FAULTS=f"die:{VENOM}", BATCHSVC_UNIT_LINES="1")

    # a line that ends engines: find it, mend the cause, release it
    ward.says("claims", "pause", "--model", ward.second, "--reason", "its prices are being checked")
    rows = [line(number, ward.first) for number in range(3)]
    rows.append(line(3, ward.first, messages=[{"role": "user", "content": f"What is {VENOM}?"}]))
    rows.append(line(4, ward.second))
    source = write_lines(tmp_path / "in.jsonl", rows)
    batch = ward.says("submit", source, "--models-by-line").split()[0]
    wait_for(lambda: f"{batch}  4" in ward.says("quarantine", "list"), "its fourth line is in quarantine")
    assert "its prices are being checked" in ward.says("status", code=None)  # the engine may just be starting again

    # a worker to be taken out of service; it stays so when it starts again
    assert "engine is drained" in ward.says("workers", "drain", "engine", "--reason", "a new driver")
    wait_for(lambda: "drained" in ward.says("workers", "list"), "it has ended what it had")
    ward.down()
    ward.up()  # without what made the line deadly
    assert "a new driver" in ward.says("workers", "list")

    # why is my batch late?
    ward.says("claims", "resume", "--model", ward.second)
    released = ward.says("quarantine", "release", batch, "--line", 4)
    assert "Line 4" in released, released
    if "batches resume" in released:  # the brake has paused it, if nothing else was finished between the crashes
        ward.says("batches", "resume", batch)
    why = ward.says("batches", "why", batch)
    assert "the workers of" in why and "workers undrain engine" in why, why
    assert "workers undrain engine" in ward.says("batches", "stuck")
    assert "The worker engine is drained: a new driver" in ward.says("status", code=None)
    looked = ward.says("doctor", code=1)
    assert "PROBLEM" in looked and "batchsvc workers undrain engine" in looked, looked
    ward.says("workers", "undrain", "engine")
    ward.says("watch", batch)
    ward.says("results", batch, "-o", tmp_path / "out.jsonl")
    answers = read_lines(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in answers] == [row["custom_id"] for row in rows], "every line has its answer"
    assert ward.num_measured_swaps() > 0, "it is known how long it took to load one in the place of the other"

    # why does this line cost that?
    usage = answers[3]["response"]["body"]["usage"]
    explained = ward.says("explain", batch, "r3")
    assert format_dollars(usage["cost_nanos"]) in explained, explained
    assert f"{usage['prompt_tokens']} in" in explained and f"{usage['completion_tokens']} out" in explained
    line_of_batch = json.loads(ward.says("explain", batch, "r3", "--json"))
    assert (line_of_batch["custom_id"], line_of_batch["cost_nanos"]) == ("r3", usage["cost_nanos"])
    assert line_of_batch["arithmetic"].endswith(f"{usage['cost_nanos']} nano-dollars")
    assert "has no line" in ward.says("explain", batch, "r99", code=None)
    assert "Every batch moves." in ward.says("batches", "stuck") and "it has ended" in ward.says(
        "batches", "why", batch
    )
    ward.says("doctor")

    # what has ended stays as it is, and what is needed isn't taken away
    assert "isn't in quarantine" in ward.says("quarantine", "release", batch, "--line", 4, code=1)
    assert "is the only model of" not in ward.says("models", "unload", ward.second)
    assert "is the only model of the worker engine" in ward.says("models", "unload", ward.first, code=1)

    # work of a model that nobody serves any more
    late = ward.says("submit", write_lines(tmp_path / "late.jsonl", [line(5, ward.second)])).split()[0]
    # both in one look: until the worker has read the order, or while its beat is late, one of them may say otherwise
    wait_for(
        lambda: (
            "A batch doesn't move: no worker serves" in ward.says("status", code=None)
            and "no worker serves" in ward.says("batches", "why", late)
        ),
        "both say so",
    )


@pytest.mark.slow
def test_one_worker_frees_the_memory_of_the_model_that_it_leaves(
    tmp_path: Path, stack_env: dict[str, str], cli: CommandLine
) -> None:
    """The real engine, a model of 250 MB and a small one: the process that served both has the memory of one."""
    large = make_tiny_model(tmp_path / "large", hidden=1024, heads=16, kv_heads=16, mlp=4096, layers=4)
    small = make_tiny_model(tmp_path / "small", seed=1)
    ward = Ward(tmp_path / "data", (str(large), str(small)), stack_env, cli)
    ward.up(BATCHSVC_ENGINE="auto", BATCHSVC_THREADS="1", BATCHSVC_KV_BYTES="16000000", BATCHSVC_WEIGHT_FORMAT="bf16")
    try:
        pid = next(row["pid"] for row in ward.status()["processes"] if row["name"] == "engine")
        used: dict[str, int] = {}
        for model in (ward.first, ward.second, ward.first):
            rows = write_lines(tmp_path / "in.jsonl", [line(number, model) for number in range(3)])
            ward.says("run", rows, "-o", tmp_path / "out.jsonl", "--name", f"{model}-{len(used)}")
            assert len(read_lines(tmp_path / "out.jsonl")) == 3
            used.setdefault(model, psutil.Process(pid).memory_info().rss)
        assert next(row["pid"] for row in ward.status()["processes"] if row["name"] == "engine") == pid
        assert used[ward.first] - used[ward.second] > 80_000_000, used
    finally:
        ward.down()
