"""`batchsvc admin`: what an operator decides about projects and about batches that were paused."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchsvc.cli.admin import opened_admin
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import BatchArgument, DataDirOption, FromEnvOption, JsonOption, KeyOption, UrlOption

app = typer.Typer(no_args_is_help=True, help="Projects and paused batches.", rich_markup_mode=None)


@app.command()
def projects(
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """List projects with their weights and token quotas."""
    console = Console(as_json=as_json)
    with opened_admin(data_dir, url, api_key, from_env=from_env) as admin:
        page = admin.list_projects()
    console.result(page)
    rows = [{**row, "quota": _quota_text(row)} for row in page["data"]]
    console.table(rows, ("id", "name", "weight", "quota"))


@app.command()
def project(
    name: Annotated[str, typer.Argument(metavar="PROJECT", help="Its id or its name.")],
    weight: Annotated[
        int | None, typer.Option("--weight", min=1, max=1000, help="Its share of the workers, next to other weights.")
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option("--quota", metavar="N", help="Tokens that its unfinished batches may hold; default: the setting."),
    ] = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Change the weight or the token quota of a project."""
    console = Console(as_json=as_json)
    changes: dict[str, Any] = {} if weight is None else {"weight": weight}
    if quota is not None:
        changes["quota_tokens"] = _parsed_quota(quota)
    if not changes:
        raise CommandError("Name what to change: --weight, --quota or both.", Exit.USAGE)
    with opened_admin(data_dir, url, api_key, from_env=from_env) as admin:
        row = admin.change_project(name, changes)
    console.out(f"{row['id']} ({row['name']}) has weight {row['weight']} and quota {_quota_text(row)}.")
    console.result(row)


@app.command()
def pause(
    batch_id: BatchArgument,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let no more of a batch run until it is resumed; its deadline stays."""
    console = Console(as_json=as_json)
    with opened_admin(data_dir, url, api_key, from_env=from_env) as admin:
        batch = admin.pause(batch_id)
    console.out(f"{batch['id']} is paused: `batchsvc admin resume {batch['id']}` lets it run on.")
    console.result(batch)


@app.command()
def resume(
    batch_id: BatchArgument,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Let a batch run on that was paused, by an operator or because engines crashed with it."""
    console = Console(as_json=as_json)
    with opened_admin(data_dir, url, api_key, from_env=from_env) as admin:
        batch = admin.resume(batch_id)
    console.out(f"{batch['id']} is {batch['status']} and not paused.")
    console.result(batch)


def _parsed_quota(text: str) -> int | None:
    if text == "default":
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:17]) <= 2**53):
        raise CommandError(f"--quota can't be {text!r}: it is a number of tokens, or default.", Exit.USAGE)
    return int(text)


def _quota_text(row: dict[str, Any]) -> str:
    return "default" if row["quota_tokens"] is None else f"{row['quota_tokens']:,} tokens"
