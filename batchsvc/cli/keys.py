"""`batchsvc keys`: API keys of the service."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchsvc.cli.amounts import seconds, seconds_or_never
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.organization import opened_organization
from batchsvc.cli.outcome import local_time

app = typer.Typer(no_args_is_help=True, help="API keys: create, list, change, rotate, revoke.", rich_markup_mode=None)

KeyArgument = Annotated[str, typer.Argument(metavar="ID", help="The key's id, from `keys list`.")]
ScopeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="S",
        help="What it may do: read-only, or files, batches, calls, usage, models, webhooks, each with :read if it may "
        "only read; again for more. Default: everything.",
    ),
]
ExpiresOption = Annotated[str | None, typer.Option("--expires", metavar="D", help="After how long, such as 90d.")]


@app.command()
@grouped
def create(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is for.")],
    project: Annotated[
        str | None, typer.Option("--project", metavar="P", help="Its project (a name is made on first use).")
    ] = None,
    is_admin: Annotated[bool, typer.Option("--admin", help="A key that may also manage keys and models.")] = False,
    is_test: Annotated[
        bool, typer.Option("--test", help="A key of test mode: no weights, no money, magic prompts (README).")
    ] = False,
    scope: ScopeOption = None,
    expires: ExpiresOption = None,
    server: AdminOptions,
) -> None:
    """Make a key. Its text is shown this once; the service keeps a hash."""
    console = server.console
    body: dict[str, Any] = {"name": name, "project": project, "is_admin": is_admin, "scopes": scope or []}
    if is_test:
        body["is_test"] = True
    if expires is not None:
        body["expires_in_seconds"] = seconds("--expires", expires)
    with opened_organization(server) as organization:
        made = organization.create_key(body)
    console.out(made["key"])
    console.result(made)


@app.command("list")
@grouped
def list_keys(
    server: AdminOptions,
) -> None:
    """List keys, without their texts."""
    console = server.console
    with opened_organization(server) as organization:
        found = organization.api_keys()
    console.result({"object": "list", "data": found})
    rows = [
        {
            **row,
            "admin": "yes" if row["is_admin"] else "",
            "mode": row.get("mode", "live"),
            "scopes": " ".join(row["scopes"]) or "all",
            "created": local_time(row["created_at"]),
            "last used": _time(row["last_used_at"]),
            "expires": _time(row["expires_at"]),
            "revoked": _time(row["revoked_at"]),
        }
        for row in found
    ]
    columns = ("id", "name", "project_id", "admin", "mode", "scopes", "created", "last used", "expires", "revoked")
    console.table(rows, columns)


@app.command()
@grouped
def update(
    *,
    key_id: KeyArgument,
    scope: ScopeOption = None,
    all_scopes: Annotated[bool, typer.Option("--all-scopes", help="Take its restrictions away.")] = False,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="D", help="After how long from now, such as 90d; or never.")
    ] = None,
    server: AdminOptions,
) -> None:
    """Change what a key may do, or until when; at once."""
    if scope and all_scopes:
        raise CommandError("--scope and --all-scopes exclude each other.", Exit.USAGE)
    body: dict[str, Any] = {"scopes": scope or []} if scope or all_scopes else {}
    if expires is not None:
        body["expires_in_seconds"] = seconds_or_never("--expires", expires)
    if not body:
        raise CommandError("Name what to change: --scope, --all-scopes or --expires.", Exit.USAGE)
    with opened_organization(server) as organization:
        row = organization.change_key(key_id, body)
    until = f"until {local_time(row['expires_at'])}" if row["expires_at"] else "without an end"
    server.console.out(f"{row['id']} ({row['name']}) may do {' '.join(row['scopes']) or 'everything'}, {until}.")
    server.console.result(row)


@app.command()
@grouped
def rotate(
    *,
    key_id: KeyArgument,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="D", help="How long the old key works on, such as 30m; 0s: no more.")
    ] = "24h",
    server: AdminOptions,
) -> None:
    """Make a key that may do what this one may; this one works on for the overlap."""
    console = server.console
    body = {"overlap_seconds": seconds("--overlap", overlap)}
    with opened_organization(server) as organization:
        made = organization.rotate_key(key_id, body)
    if not server.from_env and (directory := server.target.directory) is not None:
        for own in (directory.api_key, directory.admin_key):  # what commands on this directory use
            if own.exists() and own.read_text(encoding="utf-8").startswith(f"sk_{key_id}_"):
                directory.write_secret(own.name, made["key"])
    console.out(made["key"])
    console.say(f"{key_id} works until {local_time(made['replaces']['expires_at'])}; {made['id']} replaces it.")
    console.result(made)


@app.command()
@grouped
def revoke(
    key_id: KeyArgument,
    server: AdminOptions,
) -> None:
    """End a key at once."""
    console = server.console
    with opened_organization(server) as organization:
        ended = organization.revoke_key(key_id)
    console.out(f"{ended['id']} ({ended['name']}) is revoked.")
    console.result(ended)


def _time(moment_s: int | None) -> str:
    return "" if moment_s is None else local_time(moment_s)
