"""`batchsvc keys`: API keys of the service."""

from __future__ import annotations

from typing import Annotated

import typer

from batchsvc.cli.admin import opened_admin
from batchsvc.cli.console import Console
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption, KeyOption, UrlOption
from batchsvc.cli.outcome import local_time

app = typer.Typer(no_args_is_help=True, help="API keys: create, list, revoke.", rich_markup_mode=None)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is for.")],
    project: Annotated[
        str | None, typer.Option("--project", metavar="P", help="Its project (a name is made on first use).")
    ] = None,
    is_admin: Annotated[bool, typer.Option("--admin", help="A key that may also manage keys and models.")] = False,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a key. Its text is shown this once; the service keeps a hash."""
    console = Console(as_json=as_json)
    with opened_admin(data_dir, url, api_key, from_env=from_env) as admin:
        made = admin.create_key(name, project, is_admin=is_admin)
    console.out(made["key"])
    console.result(made)


@app.command("list")
def list_keys(
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """List keys, without their texts."""
    console = Console(as_json=as_json)
    with opened_admin(data_dir, url, api_key, from_env=from_env) as admin:
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
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `keys list`.")],
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """End a key at once."""
    console = Console(as_json=as_json)
    with opened_admin(data_dir, url, api_key, from_env=from_env) as admin:
        ended = admin.revoke_key(key_id)
    console.out(f"{ended['id']} ({ended['name']}) is revoked.")
    console.result(ended)
