"""`config show`: every setting with its value, where that comes from, and what it means; then what is wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption
from batchsvc.setting_sources import ENVIRONMENT, Origin, env_file, gathered, unknown, unknown_sentence
from batchsvc.stack.datadir import DataDir

_FLAGS = {  # what flags of `up` set in the processes of a stack
    "BATCHSVC_MODEL": "--model",
    "BATCHSVC_HOST": "--host",
    "BATCHSVC_FORCE_FORMAT": "--force-format",
    "BATCHSVC_SPEC": "--spec",
    "BATCHSVC_DRAFT": "--draft",
}
_COLUMNS = ("setting", "value", "source", "meaning")

app = typer.Typer(no_args_is_help=True, help="The settings of this machine's processes.", rich_markup_mode=None)


@app.callback()
def root() -> None:
    """Makes `show` a command of its own although there is no other."""


@app.command()
def show(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only settings like these.")] = None,
    from_env: FromEnvOption = False,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--env-file",
            metavar="F",
            help="The deployment of this file's settings (NAME=VALUE), over the environment's.",
        ),
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what isn't at its default.")] = False,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print each setting with its value (secrets masked), its source and its meaning. Exit code 1 if one is wrong."""
    console = Console(as_json=as_json)
    if (from_env or files) and data_dir is not None:
        raise CommandError("Name either --data-dir, or --from-env or --env-file, not both.", Exit.USAGE)
    env, origins = _deployment(files or []) if from_env or files else _stack(DataDir.at(data_dir))
    shown = examined(env, origins)
    wanted = [text.upper().removesuffix("*") for text in names or []]
    rows = [
        row
        for row in shown["settings"]
        if (not wanted or any(text in name for text in wanted for name in row["variables"]))
        and not (changed and row["source"] == "default")
    ]
    console.result(shown | {"settings": rows})
    console.table([_cells(row) for row in rows], _COLUMNS)
    for stranger in shown["unknown"]:
        console.say(f"batchsvc: {unknown_sentence(stranger['name'], stranger['nearest'])}")
    for says in shown["problems"]:
        console.say(f"batchsvc: {says}")
    if shown["problems"]:
        raise typer.Exit(Exit.FAILED)


def examined(env: Mapping[str, str], origins: Mapping[str, Origin]) -> dict[str, Any]:
    """What `--json` prints: settings, unknown variables with the nearest real name, and a sentence a problem."""
    from batchsvc.settings import SECRETS, Settings

    found = gathered(env, SECRETS, origins)
    settings, problems = Settings.examined(env)
    used = Settings.used_variables(found.values)
    rows = []
    for field, info in Settings.model_fields.items():
        variable, is_set = used[field]
        origin = found.origins[variable] if is_set else Origin("default" if variable not in problems else "missing")
        given = getattr(settings, field) if settings is not None else found.values.get(variable, _plain(info))
        rows.append(
            {
                "name": variable,
                "variables": [*Settings.variables_of(field), *([f"{variable}_FILE"] if variable in SECRETS else [])],
                "value": _safe(given, is_secret=variable in SECRETS),
                "default": _plain(info),
                "source": origin.kind,
                "place": origin.place or None,
                "meaning": info.description,
                "problem": problems.get(variable),
            }
        )
    strangers = [{"name": name, "nearest": near} for name, near in unknown(env, Settings.known_variables()).items()]
    return {"settings": rows, "unknown": strangers, "problems": list(problems.values())}


def _deployment(files: list[Path]) -> tuple[dict[str, str], dict[str, Origin]]:
    """The environment of this process, and over it what the files say, the last one first."""
    env: dict[str, str] = dict(os.environ)
    origins: dict[str, Origin] = {}
    for path in files:
        try:
            read = env_file(path)
        except ValueError as error:
            raise CommandError(str(error)) from error
        env |= read
        origins |= dict.fromkeys(read, Origin("env file", str(path)))
    return env, origins


def _stack(directory: DataDir) -> tuple[dict[str, str], dict[str, Origin]]:
    """What the processes of the stack in a data directory get, or would get by `up` alone."""
    from batchsvc.cli.target import stack_options
    from batchsvc.settings import Settings
    from batchsvc.stack import children
    from batchsvc.stack.child import inherited
    from batchsvc.stack.options import ALL, read_state

    ports = directory.read_json("ports.json")
    if not isinstance(ports, dict) or not {"api", "valkey", "s3"} <= set(ports):
        raise CommandError(
            f"No stack has run in {directory.root} yet: `batchsvc up` starts one; `--from-env` shows the settings of "
            "a deployment."
        )
    options = stack_options(directory, roles=ALL, purpose="up", model=None)
    state = read_state(directory)
    if state is not None:
        options = replace(
            options, model=state.model, force_format=state.force_format, drafting=state.drafting, host=state.host
        )
    unseen = children.Secrets(valkey="***", s3_key="***", s3_secret="***", jwt="***", sealing="*" * 32)  # noqa: S106
    own = children.service_env(directory, options, ports, unseen)
    own |= options.drafting.env()
    origins = {name: Origin("stack", str(directory.root)) for name in own}
    for name, flag in _FLAGS.items():
        if name in own:
            is_default = own[name] == str(Settings.model_fields[name.removeprefix("BATCHSVC_").lower()].default)
            is_inherited = own[name] == os.environ.get(name)
            if is_default:
                own.pop(name)
            else:
                origins[name] = Origin(ENVIRONMENT) if is_inherited else Origin("flag", flag)
    return {**inherited(os.environ), **own}, origins


def _plain(info: Any) -> Any:
    """A default as JSON has it; None where there is none."""
    return None if info.is_required() else info.default


def _safe(value: Any, *, is_secret: bool) -> Any:
    from batchsvc.setting_errors import masked

    if not isinstance(value, str) or not value:
        return value
    return masked(value) if is_secret or "://" in value else value


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    value = row["value"]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    shown = f"{value:,}" if is_number else "" if value is None else str(value)
    source = f"{row['source']} {row['place']}" if row["place"] else row["source"]
    return {"setting": row["name"], "value": shown, "source": source, "meaning": row["meaning"]}
