"""Children start apart from the user's folder and settings, die with their supervisor, and keep their logs short."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from batchsvc.stack import child as child_module
from batchsvc.stack.child import Child, ChildSpec, inherited, is_same, rotate, tail
from batchsvc.stack.services import Command

PARENT = """
import sys, time
from pathlib import Path
from batchsvc.stack.child import Child, ChildSpec
from batchsvc.stack.services import Command
command = Command(argv=(sys.executable, "-c", "import time; time.sleep(600)"), cwd=Path("/"))
child = Child(ChildSpec(name="sleeper", command=command, is_ready=lambda pid: True), Path(sys.argv[1]))
child.start()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_other_services_settings_stay_outside() -> None:
    env = {
        "DATABASE_URL": "postgresql://elsewhere",
        "REDIS_URL": "redis://elsewhere",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_PROFILE": "work",
        "OPENAI_API_KEY": "sk",
        "CELERY_BROKER_URL": "redis://elsewhere",
        "PYTHONPATH": "/somewhere/engine",
        "HTTP_PROXY": "http://proxy",
        "NO_PROXY": "example.org",
        "BATCHSVC_ENGINE": "fake",
        "PATH": "/bin",
    }
    kept = inherited(env)
    assert not {"DATABASE_URL", "REDIS_URL", "AWS_PROFILE", "OPENAI_API_KEY", "CELERY_BROKER_URL", "PYTHONPATH"} & {
        *kept
    }
    assert kept["BATCHSVC_ENGINE"] == "fake"
    assert kept["PATH"] == "/bin"
    assert kept["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's; elsewhere the next start cleans up")
def test_kill_9_of_the_supervisor_ends_its_children(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        created = psutil.Process(pid).create_time()
        assert is_same(pid, created)
        parent.kill()
    deadline = time.monotonic() + 20
    while is_same(pid, created):
        assert time.monotonic() < deadline, "the child outlived its supervisor"
        time.sleep(0.05)


def test_a_child_runs_in_its_directory_in_a_session_of_its_own(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.getsid(0) == os.getpid(), os.environ.get('MARK'))"
    command = Command(argv=(sys.executable, "-c", code), env={"MARK": "x"}, cwd=tmp_path)
    child = Child(ChildSpec(name="c", command=command, is_ready=lambda pid: True), tmp_path)
    child.start()
    assert child.process is not None
    assert child.process.wait(30) == 0
    assert child.last_lines() == [f"{tmp_path} True x"]
    assert child.exit_code() == 0


def test_last_lines_are_those_of_this_start(tmp_path: Path) -> None:
    (tmp_path / "c.log").write_text("from before\n")
    command = Command(argv=(sys.executable, "-c", "import sys; sys.exit('why')"), cwd=tmp_path)
    child = Child(ChildSpec(name="c", command=command, is_ready=lambda pid: True), tmp_path)
    child.start()
    assert child.process is not None
    assert child.process.wait(30) == 1
    assert child.last_lines() == ["why"]


def test_kill_ends_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    child = Child(
        ChildSpec(
            name="c", command=Command(argv=(sys.executable, "-c", code), cwd=tmp_path), is_ready=lambda pid: True
        ),
        tmp_path,
    )
    child.start()
    deadline = time.monotonic() + 20
    while child.last_lines() != ["up"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.terminate()
    child.kill()
    assert child.exit_code() == -signal.SIGKILL


def test_a_later_process_with_the_same_pid_is_another(tmp_path: Path) -> None:
    created = psutil.Process(os.getpid()).create_time()
    assert is_same(os.getpid(), created)
    assert not is_same(os.getpid(), created - 5)


def test_long_logs_are_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_LOG_BYTES", 10)
    log = tmp_path / "x.log"
    for number in range(6):
        log.write_text(f"{number} " + "x" * 10)
        rotate(log)
        assert not log.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log.1", "x.log.2", "x.log.3"]
    assert (tmp_path / "x.log.1").read_text().startswith("5 ")
    rotate(log)  # no log yet


def test_tail_reads_the_end(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("".join(f"{i}\n" for i in range(50_000)))
    assert tail(path, 2) == ["49998", "49999"]
    assert tail(tmp_path / "none", 2) == []
