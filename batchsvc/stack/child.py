"""One child process of the stack: started apart from the user's folder, logged to a file, dead when we are.

On Linux a two-line shim asks the kernel to kill the child when its supervisor dies (even by kill -9) and becomes the
program; elsewhere the next start ends what the last one left, by pid and start time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from batchsvc.stack.services import Command

State = Literal["starting", "ready", "restarting", "stopping", "stopped"]

# argv: the pid that must be alive, then the program; signal 9, option 1 is PR_SET_PDEATHSIG
_SHIM = (
    "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,9,0,0,0);"
    "os.getppid()==int(sys.argv[1]) or sys.exit(1);os.execvp(sys.argv[2],sys.argv[2:])"
)
# what would bend a child: other services' settings, other code, other configuration of the programs we start
_STRIPPED_PREFIXES = ("AWS_", "OPENAI_", "CELERY_", "WEED_", "S3_", "PYTHON")
_STRIPPED = (
    "DATABASE_URL",
    "REDIS_URL",
    "DATABASE_URL_FILE",
    "REDIS_URL_FILE",
    "BATCHSVC_SECRET_KEY_FILE",
    "BATCHSVC_TLS_CERT",
    "BATCHSVC_TLS_KEY",
    "VIRTUAL_ENV",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    """How long a log may grow before it is moved aside, and how many older ones are kept: BATCHSVC_LOG_BYTES and
    BATCHSVC_LOG_FILES."""

    size_bytes: int = 8 * 1024 * 1024
    kept: int = 3

    @classmethod
    def from_env(cls) -> LogLimits:
        """What this process's environment says. Raises SettingsError for a setting that can't be used."""
        from batchsvc.settings import Settings

        nowhere = {"DATABASE_URL": "sqlite:///nowhere", "REDIS_URL": "redis://nowhere"}
        settings = Settings.from_env({**inherited(os.environ), **nowhere})
        return cls(size_bytes=settings.log_bytes, kept=settings.log_files)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run and how to judge it. `is_data` marks Valkey and S3, without which nothing else can go on."""

    name: str
    command: Command
    is_ready: Callable[[int], bool]  # asked with the child's pid
    is_data: bool = False
    grace_s: float = 10
    on_death: Callable[[int], None] | None = None  # called with the pid of a child that ended by itself
    signals: str = ""  # where it serves /livez, /readyz and /metrics

    @property
    def role(self) -> str:
        """What it does: a second engine worker is `engine-2`."""
        return self.name.partition("-")[0]


@dataclass(slots=True)
class Child:
    """A running or to-be-restarted child. Not thread-safe: the supervisor's thread owns it."""

    spec: ChildSpec
    logs: Path
    limits: LogLimits = LogLimits()
    state: State = "stopped"
    process: subprocess.Popen[bytes] | None = None
    created: float = 0.0
    crashes: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    restart_at: float = 0.0
    log_start: int = 0  # where the output of the current process begins in its log

    @property
    def log(self) -> Path:
        return self.logs / f"{self.spec.name}.log"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def start(self) -> None:
        """Start the process; its output goes to the end of its log."""
        rotate(self.log, self.limits)
        argv = list(self.spec.command.argv)
        if sys.platform == "linux":
            argv = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *argv]
        with self.log.open("ab") as sink:
            self.log_start = sink.tell()
            self.process = subprocess.Popen(
                argv,
                env={**inherited(os.environ), **self.spec.command.env},
                cwd=self.spec.command.cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self.created = created_of(self.process.pid) or 0.0
        self.state = "starting"

    def exit_code(self) -> int | None:
        """The exit code if the process has ended, else None."""
        return self.process.poll() if self.process else None

    def terminate(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
        self.state = "stopping"

    def kill(self) -> None:
        """End the process and whatever it started: its session is its own."""
        if self.process and self.process.poll() is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
            self.process.wait()

    def bound_log(self) -> None:
        """Move the log aside if it is long, while the process goes on writing to it."""
        if rotate(self.log, self.limits, is_open=True):
            self.log_start = 0

    def last_lines(self, count: int = 20) -> list[str]:
        """The end of what the current process wrote."""
        return tail(self.log, count, since=self.log_start)


def inherited(env: Mapping[str, str]) -> dict[str, str]:
    """The user's environment without what names other services or other code; loopback never goes by a proxy."""
    kept = {k: v for k, v in env.items() if k not in _STRIPPED and not k.startswith(_STRIPPED_PREFIXES)}
    for name in ("NO_PROXY", "no_proxy"):
        kept[name] = ",".join(filter(None, [kept.get(name, ""), "127.0.0.1,localhost,::1"]))
    # no other user's ~/.aws may answer for the embedded store
    nothing = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    return {**kept, **nothing, "AWS_EC2_METADATA_DISABLED": "true", "PYTHONUNBUFFERED": "1"}


def created_of(pid: int) -> float | None:
    """When this process was created, which tells it from a later one with the same pid; None if there is none."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def is_same(pid: int, created: float) -> bool:
    """Whether the process that was recorded as (pid, created) is still alive."""
    found = created_of(pid)
    return found is not None and abs(found - created) < 1.0


def rotate(log: Path, limits: LogLimits, *, is_open: bool = False) -> bool:
    """Move a long log aside and keep the last few. Returns whether it was long.

    `is_open`: a process writes to it, by a descriptor that no renaming would change. So it is copied, then cut to
    nothing; as it is written by appending only, the process goes on at its new end. What it writes between the last
    look and the cut, in less than a millisecond, is lost.
    """
    try:
        if log.stat().st_size < limits.size_bytes:
            return False
    except FileNotFoundError:
        return False
    for number in range(limits.kept, 1, -1):
        younger = log.with_name(f"{log.name}.{number - 1}")
        if younger.exists():
            younger.replace(log.with_name(f"{log.name}.{number}"))
    older = log.with_name(f"{log.name}.1")
    if not is_open:
        log.replace(older)
        return True
    with log.open("rb") as source, older.open("wb") as target:
        shutil.copyfileobj(source, target)
        shutil.copyfileobj(source, target)  # what was written meanwhile
        os.truncate(log, 0)
    return True


def tail(path: Path, count: int, *, since: int = 0) -> list[str]:
    """The last `count` lines of a text file from the offset `since` on, without reading all of a long one."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - 64 * 1024))
            return file.read().decode("utf-8", "replace").rstrip("\n").split("\n")[-count:]
    except OSError:
        return []
