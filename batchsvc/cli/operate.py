"""`batchsvc admin`: what an operator decides about projects and about batches that were paused."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchsvc.cli import incidents
from batchsvc.cli.admin import opened_admin
from batchsvc.cli.again import resumed
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import AdminOptions, BatchArgument, ProjectArgument, grouped
from batchsvc.money import format_dollars, parse_dollars

app = typer.Typer(no_args_is_help=True, help="Projects, their stores, and paused batches.", rich_markup_mode=None)


@app.command()
@grouped
def projects(
    server: AdminOptions,
) -> None:
    """List projects with their weights, token quotas and limits."""
    console = server.console
    with opened_admin(server) as admin:
        page = admin.list_projects()
    console.result(page)
    rows = [
        {**row, "quota": _quota_text(row), "budget": _budget_text(row), "prepaid": "yes" if row["is_prepaid"] else ""}
        for row in page["data"]
    ]
    console.table(rows, ("id", "name", "weight", "quota", "budget", "prepaid"))


@app.command()
@grouped
def project(
    *,
    name: ProjectArgument,
    weight: Annotated[
        int | None, typer.Option("--weight", min=1, max=1000, help="Its share of the workers, next to other weights.")
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option("--quota", metavar="N", help="Tokens that its unfinished batches may hold; default: the setting."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="DOLLARS", help="The most that it may spend a month (UTC); none: no limit."),
    ] = None,
    prepaid: Annotated[
        bool | None, typer.Option("--prepaid/--postpaid", help="Whether it spends only what was topped up.")
    ] = None,
    alert: Annotated[
        str | None,
        typer.Option(
            "--alert", metavar="LIST", help="Percent of a limit to be told of by webhook, such as 50,80,100; or none."
        ),
    ] = None,
    server: AdminOptions,
) -> None:
    """Change the weight, the token quota or the limits of a project. Batches that run keep to a new limit soon."""
    console = server.console
    changes: dict[str, Any] = {} if weight is None else {"weight": weight}
    if quota is not None:
        changes["quota_tokens"] = _parsed_quota(quota)
    if budget is not None:
        changes["budget_nanos"] = _parsed_budget(budget)
    if prepaid is not None:
        changes["is_prepaid"] = prepaid
    if alert is not None:
        changes["alert_percents"] = _parsed_percents(alert)
    if not changes:
        raise CommandError(
            "Name what to change: --weight, --quota, --budget, --prepaid, --postpaid or --alert.", Exit.USAGE
        )
    with opened_admin(server) as admin:
        row = admin.change_project(name, changes)
    limits = f"monthly budget {_budget_text(row)}{', prepaid' if row['is_prepaid'] else ''}"
    console.out(f"{row['id']} ({row['name']}) has weight {row['weight']} and quota {_quota_text(row)}; {limits}.")
    console.result(row)


@app.command()
@grouped
def pause(
    batch_id: BatchArgument,
    server: AdminOptions,
) -> None:
    """Let no more of a batch run until it is resumed; its deadline stays."""
    console = server.console
    with incidents.opened(server) as verbs:
        batch = verbs.pause_batch(batch_id, None)
    console.out(f"{batch['id']} is paused: `batchsvc admin resume {batch['id']}` lets it run on.")
    console.result(batch)


@app.command()
@grouped
def resume(
    batch_id: BatchArgument,
    server: AdminOptions,
) -> None:
    """Let a batch run on that was paused, by an operator or because engines crashed with it."""
    console = server.console
    with incidents.opened(server) as verbs:
        batch = verbs.resume_batch(batch_id)
    console.out(resumed(batch))
    console.result(batch)


def _parsed_quota(text: str) -> int | None:
    if text == "default":
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:17]) <= 2**53):
        raise CommandError(f"--quota can't be {text!r}: it is a number of tokens, or default.", Exit.USAGE)
    return int(text)


def _parsed_budget(text: str) -> int | None:
    if text == "none":
        return None
    nanos = parse_dollars(text)
    if nanos is None or nanos < 0:
        raise CommandError(f"--budget can't be {text!r}: it is an amount of dollars such as 500, or none.", Exit.USAGE)
    return nanos


def _parsed_percents(text: str) -> list[int] | None:
    if text in ("default", "none"):
        return None if text == "default" else []
    parts = text.split(",")
    if len(parts) > 20 or not all(part.isascii() and part.isdigit() and 1 <= int(part[:4]) <= 100 for part in parts):
        raise CommandError(
            f"--alert can't be {text!r}: it is percentages such as 50,80,100, or none, or default.", Exit.USAGE
        )
    return [int(part) for part in parts]


def _budget_text(row: dict[str, Any]) -> str:
    return "none" if row["budget_nanos"] is None else format_dollars(row["budget_nanos"])


def _quota_text(row: dict[str, Any]) -> str:
    return "default" if row["quota_tokens"] is None else f"{row['quota_tokens']:,} tokens"
