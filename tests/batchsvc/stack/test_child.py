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

from batchsvc.settings import SettingsError
from batchsvc.stack.child import Child, ChildSpec, LogLimits, inherited, is_same, rotate, tail
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


def test_long_logs_are_moved_aside(tmp_path: Path) -> None:
    log, limits = tmp_path / "x.log", LogLimits(size_bytes=10, kept=3)
    for number in range(6):
        log.write_text(f"{number} " + "x" * 10)
        assert rotate(log, limits) and not log.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log.1", "x.log.2", "x.log.3"]
    assert (tmp_path / "x.log.1").read_text().startswith("5 ")
    assert not rotate(log, limits), "no log yet"


def test_limits_of_logs_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LogLimits.from_env() == LogLimits(), "unset"
    monkeypatch.setenv("BATCHSVC_LOG_BYTES", "2000000")
    monkeypatch.setenv("BATCHSVC_LOG_FILES", "9")
    assert LogLimits.from_env() == LogLimits(size_bytes=2_000_000, kept=9)
    monkeypatch.setenv("BATCHSVC_LOG_FILES", "0")
    with pytest.raises(SettingsError, match="BATCHSVC_LOG_FILES can't be '0'"):
        LogLimits.from_env()


def test_the_log_of_a_running_process_stays_bounded_and_whole(tmp_path: Path) -> None:
    script = "import sys\nfor n in range(3000):\n print(n, 'x' * 60, flush=True); n % 300 or sys.stdin.readline()"
    command = Command(argv=(sys.executable, "-c", script), cwd=tmp_path)
    spec = ChildSpec(name="t", command=command, is_ready=lambda _pid: True)
    child = Child(spec, tmp_path, LogLimits(size_bytes=10_000, kept=4))
    with child.log.open("ab") as sink:  # as `start` opens it, with an input that makes the process wait for us
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=sink)
    assert process.stdin is not None
    for turn in range(10):
        process.stdin.write(b"\n")
        process.stdin.flush()
        last = min(300 * (turn + 1), 2999)
        deadline = time.monotonic() + 30
        while not tail(child.log, 1)[0].startswith(f"{last} ") or not child.log.read_bytes().endswith(b"\n"):
            assert time.monotonic() < deadline, f"line {last} never came"
            time.sleep(0.01)
        child.bound_log()
        assert child.log.stat().st_size < 10_000
    process.stdin.close()
    assert process.wait(30) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["t.log", "t.log.1", "t.log.2", "t.log.3", "t.log.4"]
    kept = [line for number in (4, 3, 2, 1) for line in (tmp_path / f"t.log.{number}").read_text().splitlines()]
    kept += child.log.read_text().splitlines()
    numbers = [int(line.split()[0]) for line in kept]
    assert numbers == list(range(numbers[0], 3000)), "no line is lost between one file and the next, and none is twice"


def test_tail_reads_the_end(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("".join(f"{i}\n" for i in range(50_000)))
    assert tail(path, 2) == ["49998", "49999"]
    assert tail(tmp_path / "none", 2) == []
