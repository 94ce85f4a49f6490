"""`batchsvc keys`: API keys of the service."""

from __future__ import annotations

from typing import Annotated

import typer

from batchsvc.cli.admin import opened_admin
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.outcome import local_time

app = typer.Typer(no_args_is_help=True, help="API keys: create, list, revoke.", rich_markup_mode=None)


@app.command()
@grouped
def create(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is for.")],
    project: Annotated[
        str | None, typer.Option("--project", metavar="P", help="Its project (a name is made on first use).")
    ] = None,
    is_admin: Annotated[bool, typer.Option("--admin", help="A key that may also manage keys and models.")] = False,
    server: AdminOptions,
) -> None:
    """Make a key. Its text is shown this once; the service keeps a hash."""
    console = server.console
    with opened_admin(server) as admin:
        made = admin.create_key(name, project, is_admin=is_admin)
    console.out(made["key"])
    console.result(made)


@app.command("list")
@grouped
def list_keys(
    server: AdminOptions,
) -> None:
    """List keys, without their texts."""
    console = server.console
    with opened_admin(server) as admin:
        page = admin.list_keys()
    console.result(page)
    rows = [
        {
            **row,
            "admin": "yes" if row["is_admin"] else "",
            "created": local_time(row["created_at"]),
            "revoked": local_time(row["revoked_at"]) if row["revoked_at"] else "",
        }
        for row in page["data"]
    ]
    console.table(rows, ("id", "name", "project_id", "admin", "created", "revoked"))


@app.command()
@grouped
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `keys list`.")],
    server: AdminOptions,
) -> None:
    """End a key at once."""
    console = server.console
    with opened_admin(server) as admin:
        ended = admin.revoke_key(key_id)
    console.out(f"{ended['id']} ({ended['name']}) is revoked.")
    console.result(ended)
