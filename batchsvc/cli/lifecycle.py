"""`up`, `down`, `status`, `logs`: the embedded stack as a whole."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsvc.cli import attention, formats
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import DataDirOption, DraftOption, ForceFormatOption, JsonOption, SpecOption
from batchsvc.cli.target import stack_options
from batchsvc.stack.child import tail
from batchsvc.stack.datadir import DataDir, InUseError
from batchsvc.stack.launch import launch, stop_running
from batchsvc.stack.options import ALL, Drafting, StackState, live_processes, read_state

_SHOWN_LINES = 20
_YIELD_S = 60.0


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is ready; it stays running.")] = False,
    host: Annotated[str | None, typer.Option("--host", help="Address of the API (default 127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port of the API (default: remembered, else 8080).")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="M", help="Model to serve: name, path, hf:... Repeat it to serve several."),
    ] = None,
    one_engine: Annotated[
        bool,
        typer.Option("--one-engine", help="One engine worker serves all these models in turn, instead of one each."),
    ] = False,
    force_format: ForceFormatOption = False,
    spec: SpecOption = None,
    draft: DraftOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start the stack and keep it running. What proposes tokens is for the first model."""
    console = Console(as_json=as_json)
    directory = DataDir.at(data_dir)
    directory.create()
    wanted = models or []
    options = stack_options(
        directory,
        roles=ALL,
        purpose="up",
        model=next(iter(wanted), None),
        more_models=wanted[1:],
        host=host,
        port=port,
        one_engine=one_engine,
        force_format=force_format,
        drafting=Drafting(spec=spec, draft=draft),
    )
    _wait_for_short_commands(directory)

    def ready(state: StackState) -> None:
        console.out(ready_block(state, directory))
        console.result(status_of(directory, state))

    if detach:
        if (pid := directory.holder()) is not None:
            raise InUseError(directory.root, pid)
        ready(launch(options, console.say).state)
        return
    from batchsvc.stack.supervisor import Supervisor

    Supervisor(options, console.say).run(ready)


def down(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Stop the stack; unfinished batches go on when it runs again."""
    console = Console(as_json=as_json)
    directory = DataDir.at(data_dir)
    state = read_state(directory)
    if state is None:
        console.out(f"No stack is running in {directory.root}.")
    else:
        stop_running(pid=state.pid, created=state.created, say=console.say)
        console.out(f"The stack in {directory.root} has stopped.")
    console.result(status_of(directory, None))


def status(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Show the stack; exit code 0 only when all its processes are ready."""
    console = Console(as_json=as_json)
    directory = DataDir.at(data_dir)
    state = read_state(directory)
    served = [] if state is None else _served(state, directory)
    found = {} if state is None else attention.look(state, directory)
    shown = status_of(directory, state) | {"served": served} | found
    console.result(shown)
    if state is None:
        console.out(f"No stack is running in {directory.root}: start one with `batchsvc up`.")
        raise typer.Exit(Exit.FAILED)
    console.fields(
        {"URL": state.url, "Data": directory.root, "Model": ", ".join(state.models), "Phase": shown["phase"]}
    )
    console.table(shown["processes"], ("name", "pid", "state", "signals"))
    for row in served:
        if ran_in := formats.told(row):
            console.out(f"{row['id']} runs in {ran_in}")
        if row["note"]:
            console.out(f"{row['id']}: {row['note']}")
    for says in attention.sentences(found):
        console.out(says)
    if not all(process["state"] == "ready" for process in shown["processes"]) or shown["phase"] != "ready":
        raise typer.Exit(Exit.FAILED)


def logs(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these, e.g. engine.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is written from now on.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines of each log.")] = _SHOWN_LINES,
    data_dir: DataDirOption = None,
) -> None:
    """Show the end of the stack's logs."""
    console = Console()
    directory = DataDir.at(data_dir)
    paths = sorted(path for path in directory.logs.glob("*.log") if not names or path.stem in names)
    if missing := set(names or ()) - {path.stem for path in paths}:
        raise CommandError(f"There is no log of {', '.join(sorted(missing))} in {directory.logs}.")
    if not paths:
        raise CommandError(f"There are no logs in {directory.logs}: no stack has run there yet.")
    offsets: dict[Path, int] = {}
    for path in paths:
        offsets[path] = path.stat().st_size
        for line in tail(path, lines) if lines else []:
            if line:
                console.out(f"{path.stem} | {line}")
    while follow:
        time.sleep(0.3)
        for path in directory.logs.glob("*.log"):
            if not names or path.stem in names:
                offsets[path] = _more(console, path, offsets.get(path, 0))


def status_of(directory: DataDir, state: StackState | None) -> dict[str, Any]:
    """What `status --json` prints; url is null and the list empty when nothing runs."""
    processes = live_processes(state) if state else ()
    return {
        "url": state.url if state else None,
        "data_dir": str(directory.root),
        "model": state.model if state else None,
        "models": list(state.models) if state else [],
        "phase": _phase(state) if state else "stopped",
        "processes": [{"name": p.name, "pid": p.pid, "state": p.state, "signals": p.signals} for p in processes],
    }


def _phase(state: StackState) -> str:
    """What the stack says of itself, and what its API says of the parts when all processes seem well."""
    if not state.is_ready:
        return state.phase if state.phase != "ready" else "not ready"
    import httpx

    try:
        health = httpx.get(state.url.removesuffix("/v1") + "/readyz", timeout=10, trust_env=False).json()
        broken = [text for text in health["parts"].values() if text != "ok"]
    except (httpx.HTTPError, ValueError, KeyError, AttributeError):
        return "the API doesn't answer"
    return " ".join(broken) or "ready"


def _served(state: StackState, directory: DataDir) -> list[dict[str, Any]]:
    """The models of this stack as its API shows them; none if it doesn't answer."""
    import httpx

    try:
        key = directory.api_key.read_text(encoding="utf-8").strip()
        headers = {"Authorization": f"Bearer {key}"}
        page = httpx.get(f"{state.url}/models", headers=headers, timeout=10, trust_env=False).json()
        rows = [row for row in page["data"] if row["id"] in state.models]
        return [{name: row[name] for name in ("id", "weight_format", "kv_format", "quality", "note")} for row in rows]
    except (OSError, httpx.HTTPError, ValueError, KeyError):
        return []


def ready_block(state: StackState, directory: DataDir) -> str:
    """What one sees when the stack is up: where it is, and four lines that work as they stand."""
    body = {"model": state.model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    program = program_name()
    return "\n".join(
        [
            "",
            "batchsvc is ready.",
            f"  URL    {state.url}",
            f"  Key    in {directory.api_key}",
            f"  Data   {directory.root}",
            f"  Model  {', '.join(state.models)}",
            "",
            "Four lines to copy:",
            f"  export OPENAI_BASE_URL={state.url} OPENAI_API_KEY=$(cat {shlex.quote(str(directory.api_key))})",
            f"  echo {shlex.quote(line)} > hello.jsonl",
            f"  {program} run hello.jsonl",
            "  cat hello.results.jsonl",
            "",
        ]
    )


def program_name() -> str:
    """How this command is called from the user's shell: by name if that finds us, else by path."""
    path = Path(sys.argv[0]).absolute()
    found = shutil.which("batchsvc")
    return "batchsvc" if found and Path(found).resolve() == path.resolve() else shlex.quote(str(path))


def _wait_for_short_commands(directory: DataDir) -> None:
    """A stack that `list` or another short command started goes away by itself; `up` waits for that."""
    deadline = time.monotonic() + _YIELD_S
    while (state := read_state(directory)) is not None and "engine" not in state.roles:
        if time.monotonic() > deadline:
            raise InUseError(directory.root, state.pid)
        time.sleep(0.1)


def _more(console: Console, path: Path, offset: int) -> int:
    try:
        if path.stat().st_size < offset:  # the log was moved aside: first what it said after our last look
            aside = path.with_name(f"{path.name}.1")
            while aside.exists() and offset < aside.stat().st_size:
                reached = _more(console, aside, offset)
                if reached == offset:
                    break
                offset = reached
            offset = 0
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(1 << 20)
    except FileNotFoundError:
        return offset
    whole, newline, _ = data.rpartition(b"\n")
    for line in whole.decode("utf-8", "replace").split("\n") if newline else []:
        console.out(f"{path.name.partition('.')[0]} | {line}")
    return offset + len(whole) + len(newline)
