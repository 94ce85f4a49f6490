"""`batchsvc quarantine`: lines that ended engine processes, and letting them run again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from batchsvc.cli import incidents
from batchsvc.cli.options import AdminOptions, BatchArgument, grouped

app = typer.Typer(no_args_is_help=True, help="Lines that ended engine processes: list, release.", rich_markup_mode=None)


@app.command("list")
@grouped
def list_quarantine(
    *,
    batch_id: Annotated[str | None, typer.Argument(metavar="[BATCH]", help="Only of this batch.")] = None,
    server: AdminOptions,
) -> None:
    """List lines that got an error line because engines ended with them, and units that run alone for now."""
    with incidents.opened(server) as verbs:
        page = verbs.quarantine(batch_id)
    console = server.console
    console.result(page)
    poison = [row for row in page["data"] if row["object"] == "quarantine.line"]
    suspects = [row for row in page["data"] if row["object"] == "quarantine.unit"]
    if not page["data"]:
        console.out("Nothing is in quarantine.")
    if poison:
        rows = [
            {
                **row,
                "batch": row["batch_id"],
                "status": row["batch_status"],
                "found": datetime.fromtimestamp(row["found_at"], UTC).strftime("%Y-%m-%d %H:%M UTC"),
            }
            for row in poison
        ]
        console.out("Lines that ended engines, and weren't run again (line: in the input, from 1):")
        console.table(rows, ("batch", "line", "status", "found"))
    if suspects:
        console.out("Units that run alone until they make progress:")
        rows = [{**row, "batch": row["batch_id"], "unit": row["unit_id"]} for row in suspects]
        console.table(rows, ("batch", "unit", "lines", "crashes", "state"))


@app.command()
@grouped
def release(
    *,
    batch_id: BatchArgument,
    lines: Annotated[
        list[int] | None,
        typer.Option("--line", min=1, metavar="N", help="Only this line of the input; repeat it for several."),
    ] = None,
    server: AdminOptions,
) -> None:
    """Let what is in quarantine of a batch run again, while the batch runs: the cause should be gone by then, or the
    line ends the engine twice more and comes back here."""
    with incidents.opened(server) as verbs:
        done = verbs.release(batch_id, lines or [])
    console = server.console
    console.result(done)
    told = []
    if done["lines"]:
        told.append(f"line {', '.join(map(str, done['lines']))} of {batch_id} runs again")
    if done["units"]:
        told.append(f"{len(done['units'])} units of it run beside others again")
    console.out("; ".join(told)[:1].upper() + "; ".join(told)[1:] + ".")
    if done["pause_reason"]:
        console.out(f"The batch is paused ({done['pause_reason']}): `batchsvc batches resume {batch_id}` lets it run.")
