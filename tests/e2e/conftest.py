"""One embedded stack a session with the fake engine and a tiny model, and the command line run against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from batchsvc.cli import main
from batchsvc.stack.datadir import DataDir
from tests.tiny import make_tiny_model

LIVENESS_S = 120.0
BATCHSVC = (sys.executable, "-P", "-c", "from batchsvc.cli import main; main()")
FAST_SETTINGS = {
    "BATCHSVC_ENGINE": "fake",
    "BATCHSVC_FAKE_TOKENS_PER_S": "1500",
    "BATCHSVC_FLUSH_S": "0.3",
    "BATCHSVC_POLL_S": "0.5",
    "BATCHSVC_REAPER_S": "1",
    "BATCHSVC_RENEW_S": "1",
    "BATCHSVC_TERM_GRACE_S": "3",
    "BATCHSVC_EGRESS_ALLOW": "127.0.0.0/8",  # receivers of tests
}


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and its two streams."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Stack:
    """The running stack."""

    directory: DataDir
    model: str
    witness: Path

    @property
    def flags(self) -> list[str]:
        return ["--data-dir", str(self.directory.root)]


@dataclass(frozen=True)
class CommandLine:
    """Runs commands in this process: a start of Python for each would be most of the time."""

    capfd: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch
    env: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: object) -> Result:
        self.capfd.readouterr()
        self.monkeypatch.setattr(sys, "argv", ["batchsvc", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = self.capfd.readouterr()
        assert "Traceback" not in said.err + said.out
        return Result(int(ended.value.code or 0), said.out, said.err)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return CommandLine(capfd, monkeypatch)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_tokens=2048))


@pytest.fixture(scope="session")
def stack_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's environment that names other services, which an embedded stack must not touch."""
    elsewhere = {
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:9/elsewhere",
        "REDIS_URL": "redis://127.0.0.1:9/0",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "elsewhere",
        "HTTP_PROXY": "http://127.0.0.1:9",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "BATCHSVC_"))}
    witness = tmp_path_factory.mktemp("witness") / "runs.jsonl"
    return {**kept, **elsewhere, **FAST_SETTINGS, "BATCHSVC_FAKE_WITNESS": str(witness)}


@pytest.fixture(scope="session")
def foreign_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with packages of our names, which must never be imported."""
    folder = tmp_path_factory.mktemp("foreign")
    for name in ("batchsvc", "engine", "workers", "migrations", "celery"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('imported from the folder of the user')\n")
    return folder


@pytest.fixture(scope="session")
def stack(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, stack_env: dict[str, str], foreign_folder: Path
) -> Iterator[Stack]:
    directory = DataDir(tmp_path_factory.mktemp("stack") / "data")
    flags = ["--data-dir", str(directory.root)]
    up = subprocess.run(
        [*BATCHSVC, "up", "--detach", "--port", "0", "--model", tiny_model, *flags],
        env=stack_env,
        cwd=foreign_folder,
        capture_output=True,
        text=True,
        timeout=LIVENESS_S,
        check=False,
    )
    assert up.returncode == 0, up.stderr
    for line in ("URL ", "Key ", "Data ", "run hello.jsonl"):
        assert line in up.stdout
    running = Stack(directory, tiny_model, Path(stack_env["BATCHSVC_FAKE_WITNESS"]))
    supervisor = psutil.Process(directory.holder())
    children = supervisor.children(recursive=True)
    yield running
    children += supervisor.children(recursive=True)
    down = subprocess.run([*BATCHSVC, "down", *flags], capture_output=True, text=True, timeout=LIVENESS_S, check=False)
    assert down.returncode == 0, down.stderr
    assert not [process.pid for process in (supervisor, *children) if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def stack_cli(stack: Stack, cli: CommandLine) -> Callable[..., Result]:
    """Commands on the running stack."""
    return lambda *arguments: cli(*arguments, *stack.flags)


def line(number: int, model: str, **body: object) -> dict[str, Any]:
    """One request; `max_tokens` 4 and a prompt of its own unless told otherwise."""
    messages = [{"role": "user", "content": f"Say the number {number}."}]
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": messages, "max_tokens": 4, **body},
    }


def write_lines(path: Path, rows: Sequence[dict[str, Any] | bytes]) -> Path:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_bytes().split(b"\n") if row]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true answer of `condition`."""
    deadline = time.monotonic() + LIVENESS_S
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"never saw: {what}"
        time.sleep(0.1)
    return answer


def processes_of(directory: DataDir) -> list[int]:
    """Every process that works in this data directory."""
    return [process.pid for process in psutil.process_iter() if _works_in(process, directory.root)]


def _works_in(process: psutil.Process, root: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()).is_relative_to(root)
    except (psutil.Error, OSError):
        return False
