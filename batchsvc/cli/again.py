"""`pause`, `resume`, `retry`, `continue`: stopping a batch for a while, and running lines again that have no answer."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.options import BatchArgument, DataDirOption, JsonOption, KeyOption, UrlOption
from batchsvc.cli.target import opened, select
from batchsvc.stack.options import READING

WindowOption = Annotated[
    str | None, typer.Option("--window", metavar="W", help="Completion window (default: as before).")
]
MaxCostOption = Annotated[
    str | None, typer.Option("--max-cost", metavar="DOLLARS", help="The most it may cost (default: as before).")
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the new batch (default: as before).")]


def pause(
    batch_id: BatchArgument,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let no more of a batch run until it is resumed; its deadline stays."""
    console = Console(as_json=as_json)
    with opened(select(data_dir, url, api_key, os.environ), console, roles=READING, purpose="pause") as session:
        batch = session.client.post(f"/batches/{batch_id}/pause", {})
    console.out(f"{batch_id} is paused: `batchsvc resume {batch_id}` lets it run on. Its deadline stays.")
    console.result(batch)


def resume(
    batch_id: BatchArgument,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a paused batch run on."""
    console = Console(as_json=as_json)
    with opened(select(data_dir, url, api_key, os.environ), console, roles=READING, purpose="resume") as session:
        batch = session.client.post(f"/batches/{batch_id}/resume", {})
    console.out(f"{batch_id} is {batch['status']} and not paused.")
    console.result(batch)


def retry(
    batch_id: BatchArgument,
    name: NameOption = None,
    window: WindowOption = None,
    max_cost: MaxCostOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run all lines of an ended batch again that have an error, as a new batch; print its id."""
    wishes = _wishes(name, window, max_cost)
    _again(batch_id, "retry", wishes, Console(as_json=as_json), data_dir, url, api_key)


def continue_(
    batch_id: BatchArgument,
    name: NameOption = None,
    window: WindowOption = None,
    max_cost: MaxCostOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the lines that an expired or cancelled batch has not run, as a new batch; print its id."""
    wishes = _wishes(name, window, max_cost)
    _again(batch_id, "continue", wishes, Console(as_json=as_json), data_dir, url, api_key)


def _wishes(name: str | None, window: str | None, max_cost: str | None) -> dict[str, Any]:
    wishes = {"name": name, "completion_window": window, "max_cost": max_cost}
    return {key: value for key, value in wishes.items() if value is not None}


def _again(
    batch_id: str,
    scope: str,
    wishes: dict[str, Any],
    console: Console,
    data_dir: DataDirOption,
    url: UrlOption,
    api_key: KeyOption,
) -> None:
    target = select(data_dir, url, api_key, os.environ)
    with opened(target, console, roles=READING, purpose=scope) as session:
        batch = session.client.run_again(batch_id, scope, wishes)
    console.out(batch["id"])
    flags = target.flags()
    console.say(
        f"`batchsvc watch {batch['id']}{flags}` shows it, and `batchsvc results {batch['id']} --merged -o F{flags}` "
        f"writes one complete file with what {batch_id} has answered."
    )
    console.result(batch)
