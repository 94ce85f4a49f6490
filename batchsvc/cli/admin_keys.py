"""`batchsvc admin-keys`: the keys of operators."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchsvc.cli.amounts import seconds
from batchsvc.cli.keys import ExpiresOption, KeyArgument
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.organization import opened_organization
from batchsvc.cli.outcome import local_time

app = typer.Typer(no_args_is_help=True, help="Keys of operators: create, list, delete.", rich_markup_mode=None)


@app.command("list")
@grouped
def list_keys(*, server: AdminOptions) -> None:
    """List admin keys, without their texts."""
    with opened_organization(server) as organization:
        found = organization.admin_keys()
    server.console.result({"object": "list", "data": found})
    rows = [
        {
            **row,
            "may": "read" if row["scopes"] else "all",
            "created": local_time(row["created_at"]),
            "last used": local_time(row["last_used_at"]) if row["last_used_at"] else "",
            "expires": local_time(row["expires_at"]) if row["expires_at"] else "",
        }
        for row in found
    ]
    server.console.table(rows, ("id", "name", "may", "created", "last used", "expires"))


@app.command()
@grouped
def create(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is, or what for.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="It sees everything and changes nothing.")] = False,
    expires: ExpiresOption = None,
    server: AdminOptions,
) -> None:
    """Make an admin key. Its text is shown this once."""
    body: dict[str, Any] = {"name": name, "scopes": ["api.all.read"] if read_only else []}
    if expires is not None:
        body["expires_in_seconds"] = seconds("--expires", expires)
    with opened_organization(server) as organization:
        made = organization.create_admin_key(body)
    server.console.out(made["value"])
    server.console.result(made)


@app.command()
@grouped
def delete(*, key_id: KeyArgument, server: AdminOptions) -> None:
    """End an admin key at once; `batchsvc keys rotate` replaces one without a gap."""
    with opened_organization(server) as organization:
        gone = organization.delete_admin_key(key_id)
    server.console.out(f"{gone['id']} is revoked.")
    server.console.result(gone)
