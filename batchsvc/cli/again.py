"""`pause`, `resume`, `retry`, `continue`: stopping a batch for a while, and running lines again that have no answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from batchsvc.cli.options import BatchArgument, ServerOptions, grouped
from batchsvc.stack.options import READING


@dataclass(frozen=True, kw_only=True)
class RunAgain:
    """What is asked of the new batch; all else is as it was."""

    name: Annotated[str | None, typer.Option("--name", help="Name of the new batch (default: as before).")] = None
    completion_window: Annotated[
        str | None, typer.Option("--window", metavar="W", help="Completion window (default: as before).")
    ] = None
    max_cost: Annotated[
        str | None, typer.Option("--max-cost", metavar="DOLLARS", help="The most it may cost (default: as before).")
    ] = None


@grouped
def pause(batch_id: BatchArgument, server: ServerOptions) -> None:
    """Let no more of a batch run until it is resumed; its deadline stays."""
    batch = _changed(server, batch_id, "pause")
    server.console.out(f"{batch_id} is paused: `batchsvc resume {batch_id}` lets it run on. Its deadline stays.")
    server.console.result(batch)


@grouped
def resume(batch_id: BatchArgument, server: ServerOptions) -> None:
    """Let a paused batch run on."""
    batch = _changed(server, batch_id, "resume")
    server.console.out(resumed(batch))
    server.console.result(batch)


def resumed(batch: dict[str, Any]) -> str:
    """What became of a batch that was resumed: somebody else may have paused it, too."""
    waits_for = str(batch.get("waiting_for") or "")
    if waits_for.startswith("paused"):
        return f"{batch['id']} is still {waits_for}; its project and the operator each have a pause of their own."
    return f"{batch['id']} is {batch['status']} and not paused."


@grouped
def retry(batch_id: BatchArgument, wishes: RunAgain, server: ServerOptions) -> None:
    """Run all lines of an ended batch again that have an error, as a new batch; print its id."""
    _again(server, batch_id, "retry", wishes)


@grouped
def continue_(batch_id: BatchArgument, wishes: RunAgain, server: ServerOptions) -> None:
    """Run the lines that an expired or cancelled batch has not run, as a new batch; print its id."""
    _again(server, batch_id, "continue", wishes)


def _changed(server: ServerOptions, batch_id: str, change: str) -> dict[str, Any]:
    with server.opened(roles=READING, purpose=change) as session:
        return session.client.post(f"/batches/{batch_id}/{change}", {})


def _again(server: ServerOptions, batch_id: str, scope: str, wishes: RunAgain) -> None:
    asked = {name: value for name, value in asdict(wishes).items() if value is not None}
    with server.opened(roles=READING, purpose=scope) as session:
        batch = session.client.run_again(batch_id, scope, asked)
    server.console.out(batch["id"])
    flags = server.target.flags()
    server.console.say(
        f"`batchsvc watch {batch['id']}{flags}` shows it, and `batchsvc results {batch['id']} --merged -o F{flags}` "
        f"writes one complete file with what {batch_id} has answered."
    )
    server.console.result(batch)
