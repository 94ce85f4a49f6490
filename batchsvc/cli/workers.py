"""`batchsvc workers`: which engine workers are alive, what they serve, and taking one out of service."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from batchsvc.cli import incidents
from batchsvc.cli.options import AdminOptions, grouped

app = typer.Typer(no_args_is_help=True, help="Engine workers: list, drain, undrain.", rich_markup_mode=None)

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER", help="Its name, or the id of one process.")]
ReasonOption = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Why, in a line: batches and status show it.")
]
_COLUMNS = ("name", "state", "models", "units", "running", "silent", "id")


@app.command("list")
@grouped
def list_workers(*, server: AdminOptions) -> None:
    """List the workers that are alive: state, models (the first is served now), units that they hold."""
    with incidents.opened(server) as verbs:
        page = verbs.workers()
    console = server.console
    console.result(page)
    if not page["data"]:
        console.out("No engine worker is alive.")
    else:
        console.table([_row(worker) for worker in page["data"]], _COLUMNS)
    for worker in page["data"]:
        for says in (worker["note"], *worker["problems"]):
            if says:
                console.out(f"{worker['name'] or worker['id']}: {says}")
    for gone in page["drained_and_gone"]:
        console.out(f"{gone['name']} isn't running, and stays drained when it starts: {gone['reason']}")


@app.command()
@grouped
def drain(*, worker: WorkerArgument, reason: ReasonOption = None, server: AdminOptions) -> None:
    """Have a worker claim nothing more; what it has it brings to its end. Drained by its name it stays so when it
    starts again; by its id, that process alone is."""
    with incidents.opened(server) as verbs:
        page = verbs.drain(worker, reason)
    console = server.console
    console.result(page)
    held = sum(row["units"] for row in page["data"])
    left = f"it ends the {held} units that it has" if held else "it has no units"
    console.out(f"{worker} is drained: {left}. `batchsvc workers undrain {worker}` ends that.")


@app.command()
@grouped
def undrain(*, worker: WorkerArgument, server: AdminOptions) -> None:
    """Let a worker claim again."""
    with incidents.opened(server) as verbs:
        page = verbs.undrain(worker)
    server.console.result(page)
    server.console.out(f"{worker} claims again.")


def _row(worker: dict[str, Any]) -> dict[str, Any]:
    now = worker["loads"] or worker["model"]
    others = [name for name in worker["models"] if name != now]
    return {
        **worker,
        "name": worker["name"] or "",
        "models": ", ".join([now, *others]),
        "running": sum(lane["running"] for lane in worker["lanes"].values()),
        "silent": f"{worker['silent_s']:.0f} s",
    }
