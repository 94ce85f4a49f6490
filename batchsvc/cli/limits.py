"""`batchsvc limits`: how many requests, open batches and bytes a key or a project may have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchsvc.cli.admin import opened_admin
from batchsvc.cli.amounts import byte_limit, limit
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.organization import opened_organization

app = typer.Typer(no_args_is_help=True, help="Limits of projects and keys: show, set.", rich_markup_mode=None)
_NAMES = ("requests_per_minute", "max_open_batches", "max_stored_bytes")
_NONE = "number, or none: the setting's for a project, none for a key"


@app.command()
@grouped
def show(*, server: AdminOptions) -> None:
    """Show the limits of all projects, and of the keys that have their own."""
    with opened_admin(server) as admin:
        projects = admin.list_projects()["data"]
    with opened_organization(server) as organization:
        keys = [
            row for row in organization.api_keys() if row["revoked_at"] is None and any(row[name] for name in _NAMES)
        ]
    server.console.result({"projects": projects, "keys": keys})
    rows = [
        {"of": row["id"], "name": row["name"], **{name: _text(kind, row[name]) for name in _NAMES}}
        for kind, found in (("project", projects), ("key", keys))
        for row in found
    ]
    server.console.table(rows, ("of", "name", *_NAMES))


@app.command("set")
@grouped
def set_limits(
    *,
    project: Annotated[
        str | None, typer.Argument(metavar="PROJECT", help="Its id or its name; or --key, for one key.")
    ] = None,
    key_id: Annotated[str | None, typer.Option("--key", metavar="ID", help="The key, from `keys list`.")] = None,
    requests: Annotated[
        str | None, typer.Option("--requests-per-minute", metavar="N", help=f"Requests a minute: a {_NONE}.")
    ] = None,
    batches: Annotated[
        str | None, typer.Option("--open-batches", metavar="N", help=f"Unfinished batches: a {_NONE}.")
    ] = None,
    stored: Annotated[
        str | None, typer.Option("--stored-bytes", metavar="B", help="Bytes of files, such as 500GB; or none.")
    ] = None,
    server: AdminOptions,
) -> None:
    """Change limits, from the next request on. A key has its own limits beside those of its project."""
    if (project is None) == (key_id is None):
        raise CommandError("Name a project, or a key with --key.", Exit.USAGE)
    changes: dict[str, Any] = {}
    if requests is not None:
        changes["requests_per_minute"] = limit("--requests-per-minute", requests)
    if batches is not None:
        changes["max_open_batches"] = limit("--open-batches", batches)
    if stored is not None:
        changes["max_stored_bytes"] = byte_limit("--stored-bytes", stored)
    if not changes:
        raise CommandError("Name a limit: --requests-per-minute, --open-batches or --stored-bytes.", Exit.USAGE)
    if key_id is not None:
        with opened_organization(server) as organization:
            row = organization.change_key(key_id, changes)
    else:
        with opened_admin(server) as admin:
            row = admin.change_project(str(project), changes)
    kind = "project" if key_id is None else "key"
    shown = ", ".join(f"{name} {_text(kind, row[name])}" for name in _NAMES)
    server.console.out(f"{row['id']} ({row['name']}): {shown}.")
    server.console.result(row)


def _text(kind: str, value: int | None) -> str:
    if value is None:
        return "the setting's" if kind == "project" else "none"
    return f"{value:,}"
