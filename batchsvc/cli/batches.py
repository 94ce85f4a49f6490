"""`batchsvc batches`: what an operator sees and does about batches of any project."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from batchsvc.cli import exporting, incidents
from batchsvc.cli.again import resumed
from batchsvc.cli.options import AdminOptions, BatchArgument, grouped
from batchsvc.cli.workers import ReasonOption

app = typer.Typer(
    no_args_is_help=True,
    help="Batches of any project, for operators: stuck, why, pause, resume.",
    rich_markup_mode=None,
)

QuietOption = Annotated[
    float, typer.Option("--minutes", min=0, help="Minutes without a finished line that count as stuck.")
]


@app.command()
@grouped
def stuck(*, minutes: QuietOption = 10, server: AdminOptions) -> None:
    """List batches that don't move, each with the reason and the next command to run."""
    with incidents.opened(server) as verbs:
        page = verbs.stuck(60 * minutes)
    console = server.console
    console.result(page)
    if not page["data"]:
        console.out("Every batch moves.")
    for row in page["data"]:
        console.out(f"{row['id']} ({row['project_id']}, {row['status']}): {row['reason']}.")
        console.out(f"    {row['next']}")


@app.command()
@grouped
def why(*, batch_id: BatchArgument, minutes: QuietOption = 10, server: AdminOptions) -> None:
    """Say how a batch stands, why it is no further, and when it will probably end."""
    with incidents.opened(server) as verbs:
        row = verbs.why(batch_id, 60 * minutes)
    server.console.result(row)
    server.console.fields(_fields(row))


@app.command()
@grouped
def pause(*, batch_id: BatchArgument, reason: ReasonOption = None, server: AdminOptions) -> None:
    """Let no more of a batch run until an operator resumes it; its deadline stays, and its project sees the reason."""
    with incidents.opened(server) as verbs:
        batch = verbs.pause_batch(batch_id, reason)
    server.console.result(batch)
    server.console.out(
        f"{batch['id']} is paused ({batch['pause_reason']}): `batchsvc batches resume {batch['id']}` lets it run on."
    )


@app.command()
@grouped
def resume(*, batch_id: BatchArgument, server: AdminOptions) -> None:
    """End an operator's pause, or one for crashes; a pause of its project's own stays."""
    with incidents.opened(server) as verbs:
        batch = verbs.resume_batch(batch_id)
    server.console.result(batch)
    server.console.out(resumed(batch))


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    units, share = row["units"], row["progress"]["share"]
    counts = ", ".join(f"{count} {name}" for name, count in units.items() if count)
    ends = row["estimated_completion_at"]
    errors = row["errors"]
    late = "probably too late" if row["at_risk"] else "in time, as far as is known"
    return {
        "Batch": f"{row['id']} of {row['project_id']}, model {row['model'] or 'not known yet'}",
        "Status": row["status"] + ("" if share is None else f", {100 * share:.0f} % done"),
        "Reason": row["reason"] or ("it has ended" if row["progress"]["phase"] == "ended" else "none: it moves"),
        "Next": row["next"] or "nothing",
        "Units": counts or "none",
        "Workers": ", ".join(row["workers"]) or "none",
        "Ends": "not known" if ends is None else f"{_time(ends['low'])} to {_time(ends['high'])}, {late}",
        "Deadline": _time(row["expires_at"]),
        **({"Errors": ", ".join(f"{count:,} {code}" for code, count in errors.items())} if errors else {}),
        **({"Results in S3": exporting.shown(row)} if row["output_s3"] else {}),
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
