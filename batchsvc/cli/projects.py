"""`batchsvc projects`: the tenants of the service, from their creation to their archiving."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchsvc.cli.options import AdminOptions, ProjectArgument, grouped
from batchsvc.cli.organization import opened_organization
from batchsvc.cli.outcome import local_time

app = typer.Typer(no_args_is_help=True, help="Projects: create, list, rename, archive.", rich_markup_mode=None)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Its name.")]


@app.command("list")
@grouped
def list_projects(
    *,
    archived: Annotated[bool, typer.Option("--archived", help="Those that were archived, too.")] = False,
    server: AdminOptions,
) -> None:
    """List projects, newest first; `batchsvc admin projects` shows their weights and budgets, `limits show` limits."""
    with opened_organization(server) as organization:
        found = organization.projects(with_archived=archived)
    server.console.result({"object": "list", "data": found})
    rows = [{**row, "created": local_time(row["created_at"])} for row in found]
    server.console.table(rows, ("id", "name", "status", "created"))


@app.command()
@grouped
def create(*, name: NameArgument, server: AdminOptions) -> None:
    """Make a project."""
    with opened_organization(server) as organization:
        _tell(server, organization.create_project(name))


@app.command()
@grouped
def rename(*, project: ProjectArgument, name: NameArgument, server: AdminOptions) -> None:
    """Give a project another name."""
    with opened_organization(server) as organization:
        _tell(server, organization.rename_project(project, name))


@app.command()
@grouped
def archive(*, project: ProjectArgument, server: AdminOptions) -> None:
    """End a project for good: its keys are refused at once; batches that it has run to their end."""
    with opened_organization(server) as organization:
        _tell(server, organization.archive_project(project))


def _tell(server: AdminOptions, row: dict[str, Any]) -> None:
    server.console.out(f"{row['id']} ({row['name']}) is {row['status']}.")
    server.console.result(row)
