"""`batchsvc claims`: stopping all that is claimed, or what is claimed of one model, for a while."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from batchsvc.cli import incidents
from batchsvc.cli.console import Console
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.workers import ReasonOption

app = typer.Typer(no_args_is_help=True, help="Claims of units: list, pause, resume.", rich_markup_mode=None)

ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="M", help="Only those of this model (default: all of them).")
]


@app.command("list")
@grouped
def list_claims(*, server: AdminOptions) -> None:
    """List which claims are paused, since when, and why."""
    with incidents.opened(server) as verbs:
        page = verbs.claims()
    server.console.result(page)
    _tell(server.console, page)


@app.command()
@grouped
def pause(*, model: ModelOption = None, reason: ReasonOption = None, server: AdminOptions) -> None:
    """Have no worker claim anything new; what runs goes on, and interactive calls do, too."""
    with incidents.opened(server) as verbs:
        page = verbs.pause_claims(model, reason)
    server.console.result(page)
    _tell(server.console, page)


@app.command()
@grouped
def resume(*, model: ModelOption = None, server: AdminOptions) -> None:
    """End a pause: without --model that of all claims, with it that of a model's."""
    with incidents.opened(server) as verbs:
        page = verbs.resume_claims(model)
    server.console.result(page)
    _tell(server.console, page)


def lines(page: dict[str, Any]) -> list[str]:
    """A sentence for each pause."""
    found = []
    for row in page["data"]:
        since = datetime.fromtimestamp(row["created_at"], UTC).strftime("%Y-%m-%d %H:%M UTC")
        whose = f"of {row['model']} " if row["model"] else ""
        option = f" --model {row['model']}" if row["model"] else ""
        found.append(
            f"Claims {whose}are paused since {since}: {row['reason']} (`batchsvc claims resume{option}` ends that)"
        )
    return found


def _tell(console: Console, page: dict[str, Any]) -> None:
    for line in lines(page) or ["No claims are paused."]:
        console.out(line)
