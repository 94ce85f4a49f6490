"""`batchsvc service-accounts`: programs of a project, whose keys end with them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchsvc.cli.amounts import seconds
from batchsvc.cli.keys import ExpiresOption, ScopeOption
from batchsvc.cli.options import AdminOptions, ProjectArgument, grouped
from batchsvc.cli.organization import opened_organization
from batchsvc.cli.outcome import local_time

app = typer.Typer(
    no_args_is_help=True, help="Service accounts of a project: create, list, key, delete.", rich_markup_mode=None
)
AccountArgument = Annotated[str, typer.Argument(metavar="ACCOUNT", help="Its id (svc_acct_...).")]


@app.command("list")
@grouped
def list_accounts(*, project: ProjectArgument, server: AdminOptions) -> None:
    """List the service accounts of a project."""
    with opened_organization(server) as organization:
        found = organization.accounts(project)
    server.console.result({"object": "list", "data": found})
    rows = [{**row, "created": local_time(row["created_at"])} for row in found]
    server.console.table(rows, ("id", "name", "role", "created"))


@app.command()
@grouped
def create(
    *,
    project: ProjectArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is.")],
    expires: ExpiresOption = None,
    server: AdminOptions,
) -> None:
    """Make a service account and its first key, whose text is shown this once."""
    body: dict[str, Any] = {"name": name}
    if expires is not None:
        body["expires_in_seconds"] = seconds("--expires", expires)
    with opened_organization(server) as organization:
        made = organization.create_account(project, body)
    server.console.say(f"{made['id']} ({made['name']}) has the key {made['api_key']['id']}:")
    server.console.out(made["api_key"]["value"])
    server.console.result(made)


@app.command()
@grouped
def key(
    *,
    project: ProjectArgument,
    account: AccountArgument,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="What the key is for.")] = None,
    scope: ScopeOption = None,
    expires: ExpiresOption = None,
    server: AdminOptions,
) -> None:
    """Make another key of a service account. Its text is shown this once."""
    body: dict[str, Any] = {"name": name, "scopes": scope or []}
    if expires is not None:
        body["expires_in_seconds"] = seconds("--expires", expires)
    with opened_organization(server) as organization:
        made = organization.create_account_key(project, account, body)
    server.console.out(made["value"])
    server.console.result(made)


@app.command()
@grouped
def delete(*, project: ProjectArgument, account: AccountArgument, server: AdminOptions) -> None:
    """End a service account and all of its keys at once."""
    with opened_organization(server) as organization:
        gone = organization.delete_account(project, account)
    server.console.out(f"{gone['id']} is deleted, and its keys are revoked.")
    server.console.result(gone)
