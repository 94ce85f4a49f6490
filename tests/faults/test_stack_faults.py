"""Rows 73 to 75: the embedded stack started where it can't be, and killed from the top or in one of its services."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from batchsvc.stack.datadir import DataDir
from tests.e2e.conftest import BATCHSVC, FAST_SETTINGS, line, processes_of
from tests.faults.cluster import TinyModel

pytestmark = pytest.mark.faults
LIVENESS_S = 180.0
FULL_DISK = (  # what `shutil.disk_usage` says of a disk that has 1 MiB left
    sys.executable,
    "-P",
    "-c",
    "import shutil; usage = shutil.disk_usage; "
    "shutil.disk_usage = lambda path: usage(path)._replace(free=2**20); "
    "from batchsvc.cli import main; main()",
)


class OwnStack:
    """An embedded stack of the module's own, and a client of it."""

    def __init__(self, root: Path, model: str, witness: Path) -> None:
        self.directory, self.model, self.witness = DataDir(root), model, witness
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BATCHSVC_", "OPENAI_"))}
        slow = {"BATCHSVC_FAKE_TOKENS_PER_S": "200", "BATCHSVC_MAX_RUNNING": "8", "BATCHSVC_LEASE_S": "6"}
        self.env = {**kept, **FAST_SETTINGS, **slow, "BATCHSVC_FAKE_WITNESS": str(witness)}

    def command(self, *arguments: object, program: tuple[str, ...] = BATCHSVC) -> subprocess.CompletedProcess[str]:
        argv = [*program, *map(str, arguments)]
        if "--data-dir" not in argv:
            argv += ["--data-dir", str(self.directory.root)]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=LIVENESS_S, check=False)

    def up(self) -> None:
        """Running, whatever was before."""
        if self.directory.holder() is None:
            started = self.command("up", "--detach", "--port", 0, "--model", self.model)
            assert started.returncode == 0, started.stderr

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.command("status", "--json").stdout))

    def pid(self, name: str) -> int | None:
        return next((one["pid"] for one in self.status()["processes"] if one["name"] == name), None)

    def call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        key = self.directory.api_key.read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        url = self.status()["url"].removesuffix("/v1") + path
        return httpx.request(method, url, headers=headers, timeout=60, trust_env=False, **arguments)

    def submit(self, count: int) -> str:
        rows = [line(number, self.model, max_tokens=20, ignore_eos=True) for number in range(count)]
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        form = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
        file_id = self.call("POST", "/v1/files", **form).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self.call("POST", "/v1/batches", json=body).json()["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        try:
            answer = self.call("GET", f"/v1/batches/{batch_id}")
        except (httpx.HTTPError, json.JSONDecodeError):
            return {"status": "", "request_counts": {"completed": 0}}
        return dict(answer.json()) if answer.status_code == 200 else {"status": "", "request_counts": {"completed": 0}}

    def judge(self, batch_id: str, count: int) -> None:
        """Each line once, in order."""
        ended = self.batch(batch_id)
        assert ended["request_counts"] == {"total": count, "completed": count, "failed": 0}
        got = self.call("GET", f"/v1/files/{ended['output_file_id']}/content").text.splitlines()
        assert [json.loads(row)["custom_id"] for row in got] == [f"r{number}" for number in range(count)]
        costs = sum(json.loads(row)["response"]["body"]["usage"]["cost_nanos"] for row in got)
        assert ended["usage"]["cost_nanos"] == costs


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModel) -> Iterator[OwnStack]:
    made = OwnStack(tmp_path_factory.mktemp("stack") / "d", str(tiny.path), tmp_path_factory.mktemp("w") / "runs.jsonl")
    yield made
    made.command("down")
    until(lambda: not processes_of(made.directory), "all processes end")


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIVENESS_S} s: {what}"
        time.sleep(0.1)


def assert_one_sentence(refused: subprocess.CompletedProcess[str], says: str) -> None:
    assert refused.returncode == 1, refused.stderr
    assert refused.stderr.count("\n") == 1, refused.stderr
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr + refused.stdout


def test_row_73_a_start_that_cannot_be_is_one_sentence_and_harms_nothing(own_stack: OwnStack, tmp_path: Path) -> None:
    own_stack.up()
    batch_id = own_stack.submit(60)
    pids = {one["name"]: one["pid"] for one in own_stack.status()["processes"]}
    assert_one_sentence(own_stack.command("up", "--detach"), f"pid {own_stack.directory.holder()}")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        taken = own_stack.command("up", "--detach", "--port", port, "--data-dir", tmp_path / "taken")
    assert_one_sentence(taken, f"Port {port} on 127.0.0.1 is taken")
    assert_one_sentence(own_stack.command("up", "--detach", "--data-dir", _unwritable(tmp_path)), "--data-dir")
    full = own_stack.command("up", "--detach", "--data-dir", tmp_path / "full", program=FULL_DISK)
    assert_one_sentence(full, "MiB left")
    (tmp_path / "file").touch()
    assert_one_sentence(own_stack.command("up", "--detach", "--data-dir", tmp_path / "file"), "--data-dir")
    for refused in ("taken", "full"):
        assert not processes_of(DataDir(tmp_path / refused))
    assert {one["name"]: one["pid"] for one in own_stack.status()["processes"]} == pids, "nobody was disturbed"
    until(lambda: own_stack.batch(batch_id)["status"] == "completed", "the batch ends")
    own_stack.judge(batch_id, 60)


def test_row_73_stale_files_of_a_dead_stack_are_no_obstacle(own_stack: OwnStack) -> None:
    own_stack.up()
    own_stack.command("down")
    until(lambda: not processes_of(own_stack.directory), "all processes end")
    run = own_stack.directory.run
    (run / "lock").write_text("1\n")  # init lives, and holds no lock of ours
    state = own_stack.directory.read_json("state.json")
    if state is not None:
        for process in state.get("processes", []):
            process["pid"] = os.getpid()  # another program has the pid now
        own_stack.directory.write_json("state.json", state)
    own_stack.directory.write_json("ports.json", {"valkey": 1, "nonsense": "x"})
    own_stack.up()
    batch_id = own_stack.submit(3)
    until(lambda: own_stack.batch(batch_id)["status"] == "completed", "the batch ends")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_row_74_a_killed_supervisor_takes_its_children_along_and_the_next_start_goes_on(own_stack: OwnStack) -> None:
    own_stack.up()
    batch_id = own_stack.submit(60)
    until(lambda: own_stack.batch(batch_id)["request_counts"]["completed"] > 8, "parts count")
    supervisor = own_stack.directory.holder()
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not processes_of(own_stack.directory), "its children end")
    own_stack.up()
    until(lambda: own_stack.batch(batch_id)["status"] == "completed", "the batch ends")
    own_stack.judge(batch_id, 60)


@pytest.mark.parametrize("name", ["valkey", "seaweedfs", "control", "engine"])
def test_row_75_a_killed_service_comes_back_and_the_work_goes_on(own_stack: OwnStack, name: str) -> None:
    own_stack.up()
    batch_id = own_stack.submit(60)
    until(lambda: own_stack.batch(batch_id)["request_counts"]["completed"] > 4, "parts count")
    before = own_stack.pid(name)
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: own_stack.pid(name) not in (before, None), f"another {name}")
    until(lambda: own_stack.command("status", "--json").returncode == 0, "all processes ready")
    until(lambda: own_stack.batch(batch_id)["status"] == "completed", "the batch ends")
    own_stack.judge(batch_id, 60)


def _unwritable(tmp_path: Path) -> Path:
    if os.geteuid() == 0:
        return Path("/sys/batchsvc")  # not even root may make this one
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    return closed / "d"
