"""Plays systemd for one host of a test: `unit_runner.py start|stop|is-active UNIT`, from the unit file.

What runs is the unit's own commands, in its own environment and as its user where that user may read our code; a
process that fails is started again after RestartSec, one that is stopped gets its KillSignal and its TimeoutStopSec.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[2]))  # a program of its own, not a module of the tests that run

from tests.units import Command, Unit, parse

HOST = Path(os.environ["TEST_HOST_DIR"])
RUN = HOST / "run"


def unit_named(name: str) -> Unit:
    stem, at, rest = name.removesuffix(".service").partition("@")
    path = HOST / "units" / (f"{stem}@.service" if at else name)
    return parse(path.read_text(encoding="utf-8"), rest)


def prefix(unit: Unit) -> list[str]:
    """Become the unit's user, where we may and it can read us; PostgreSQL runs as no root anywhere."""
    user = unit.one("User")
    if os.geteuid() != 0 or user == "root":
        return []
    become = ["setpriv", f"--reuid={user}", "--regid=nogroup", "--clear-groups"]
    asked = [*become, "sh", "-c", f"exec {sys.executable} -c 'import batchsvc.settings'"]
    reads = subprocess.run(asked, capture_output=True, check=False).returncode == 0
    is_postgres = any("postgres" in command.argv[0] for command in unit.commands("ExecStart"))
    return become if reads or is_postgres else []


def environment(unit: Unit) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", **unit.environment()}


def run_to_end(unit: Unit, commands: list[Command], log: Path, **more: str) -> None:
    for argv, may_fail in commands:
        with log.open("ab") as sink:
            code = subprocess.run(
                [*prefix(unit), *argv], env=environment(unit) | more, cwd=unit.one("WorkingDirectory", "/"),
                stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, timeout=300, check=False,
            ).returncode  # fmt: skip
        if code and not may_fail:
            sys.exit(f"{argv} ended with {code}: {log.read_text(errors='replace')[-3000:]}")


def start(name: str) -> None:
    stop(name)
    unit, log = unit_named(name), RUN / f"{name}.log"
    for path in unit.all("ReadWritePaths"):
        assert Path(path).is_dir(), f"{path} isn't there: systemd would not start {name}"
    run_to_end(unit, unit.commands("ExecStartPre"), log)
    if unit.one("Type") == "oneshot":
        run_to_end(unit, unit.commands("ExecStart"), log)
        (RUN / f"{name}.done").touch()
        return
    with log.open("ab") as sink:
        watcher = subprocess.Popen(
            [sys.executable, __file__, "watch", name], stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    (RUN / f"{name}.pid").write_text(str(watcher.pid))
    run_to_end(unit, unit.commands("ExecStartPost"), log, MAINPID=str(watcher.pid))


def watch(name: str) -> None:
    """Runs a unit's process, again whenever it fails, until SIGTERM."""
    unit, stopping = unit_named(name), False
    child: subprocess.Popen[bytes] | None = None

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if child is not None and child.poll() is None:
            child.send_signal(getattr(signal, unit.one("KillSignal", "SIGTERM")))

    signal.signal(signal.SIGTERM, on_signal)
    [command] = unit.commands("ExecStart")
    while not stopping:
        child = subprocess.Popen(
            [*prefix(unit), *command.argv], env=environment(unit), cwd=unit.one("WorkingDirectory", "/")
        )
        while child.poll() is None and not stopping:
            time.sleep(0.05)
        if stopping:
            try:
                child.wait(unit.seconds("TimeoutStopSec", "90"))
            except subprocess.TimeoutExpired:
                child.kill()
            return
        if child.returncode == 0:
            return
        time.sleep(1)  # not RestartSec: no test waits longer than it must


def stop(name: str) -> None:
    path = RUN / f"{name}.pid"
    if not path.exists():
        return
    pid = int(path.read_text())
    path.unlink()
    try:
        os.kill(pid, signal.SIGTERM)
        while True:
            os.kill(pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        return


def is_active(name: str) -> None:
    """Exits with 3 if it isn't, as systemctl does."""
    if not any((RUN / f"{name}.{kind}").exists() for kind in ("pid", "done")):
        sys.exit(3)


if __name__ == "__main__":
    RUN.mkdir(exist_ok=True)
    {"start": start, "stop": stop, "watch": watch, "is-active": is_active}[sys.argv[1]](sys.argv[2])
