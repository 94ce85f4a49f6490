"""`batchsvc keys`: API keys, made and ended in the service's own database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.database import database_of
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption

app = typer.Typer(no_args_is_help=True, help="API keys: create, list, revoke.", rich_markup_mode=None)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is for.")],
    project: Annotated[str, typer.Option("--project", metavar="P", help="Its project, made on first use.")] = "default",
    is_admin: Annotated[bool, typer.Option("--admin", help="A key that may also manage keys and models.")] = False,
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a key. Its text is shown this once; the service keeps a hash."""
    from batchsvc.accounts import service

    console = Console(as_json=as_json)

    def make(session: Any) -> tuple[Any, str]:
        found = service.project_named(session, project) or service.create_project(session, project)
        return service.create_key(session, found.id, name, is_admin)

    with database_of(data_dir, from_env=from_env) as database:
        row, text = database.run(make)
    console.out(text)
    console.result({**_shown(row), "key": text})


@app.command("list")
def list_keys(data_dir: DataDirOption = None, from_env: FromEnvOption = False, as_json: JsonOption = False) -> None:
    """List keys, without their texts."""
    from batchsvc.accounts import service

    console = Console(as_json=as_json)
    with database_of(data_dir, from_env=from_env) as database, database.reading() as session:
        rows = [_shown(row) for row in service.list_keys(session)]
    console.result({"object": "list", "data": rows, "has_more": False})
    for row in rows:
        row["created"] = _day(row["created_at"])
        row["revoked"] = _day(row["revoked_at"]) if row["revoked_at"] else ""
        row["admin"] = "yes" if row["is_admin"] else ""
    console.table(rows, ("id", "name", "project_id", "admin", "created", "revoked"))


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `keys list`.")],
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """End a key at once."""
    from batchsvc.accounts import service

    console = Console(as_json=as_json)
    with database_of(data_dir, from_env=from_env) as database:
        row = database.run(lambda session: service.revoke_key(session, key_id))
    console.out(f"{row.id} ({row.name}) is revoked.")
    console.result(_shown(row))


def _shown(row: Any) -> dict[str, Any]:
    return {
        "id": row.id,
        "object": "api_key",
        "name": row.name,
        "project_id": row.project_id,
        "is_admin": row.is_admin,
        "created_at": row.created_ms // 1000,
        "revoked_at": row.revoked_ms // 1000 if row.revoked_ms else None,
    }


def _day(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
