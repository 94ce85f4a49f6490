"""`submit`, `watch`, `list`, `show`, `cancel`: single steps of a batch's life."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Annotated, Any

import typer

from batchsvc.cli import exporting, outcome, served
from batchsvc.cli.exits import CommandError, Exit, allowed_errors
from batchsvc.cli.follow import follow
from batchsvc.cli.input_file import InputOptions, model_to_serve
from batchsvc.cli.options import AllowErrorsOption, BatchArgument, ServerOptions, grouped
from batchsvc.cli.prompt import Prompting, requests_of
from batchsvc.cli.run import BatchOptions, Job
from batchsvc.cli.target import names_itself
from batchsvc.money import format_dollars
from batchsvc.stack.options import ALL, CANCELLING, READING

_CANCEL_S = 10.0


@grouped
def submit(given: InputOptions, prompting: Prompting, wanted: BatchOptions, server: ServerOptions) -> None:
    """Upload a file and create its batch; print the batch's id."""
    console, source = server.console, given.chosen()
    target = server.target
    with requests_of(source, prompting, console, model=wanted.line_model, skip_invalid=wanted.skip_invalid) as requests:
        job = Job.of(requests, prompting, wanted, label=source)
        named = job.model or model_to_serve(target, requests)
        is_ours = named is None or names_itself(named)  # else the registry knows it, or the API says that nobody does
        with server.opened(roles=READING, purpose="submit", model=named, needs_model=is_ours) as session:
            batch = job.start(session, console)
            console.out(batch["id"])
            console.result(batch)
            if session.is_own:
                flags = target.flags()
                watch_it = f"`batchsvc watch {batch['id']}{flags}`"
                console.say(f"It waits until a stack runs: `batchsvc up{flags}` or {watch_it}.")


@grouped
def watch(
    *,
    batch_id: BatchArgument,
    allow_errors: AllowErrorsOption = None,
    server: ServerOptions,
) -> None:
    """Show a batch until it has ended, and its results are in S3 if they go there."""
    console = server.console
    allowed_errors(allow_errors, 0)
    target = server.target
    needed = served.model_of_batch(target.directory, batch_id) if target.directory else None
    with server.opened(roles=ALL, purpose="watch", model=needed) as session:
        try:
            batch = session.client.batch(batch_id)
            batch = follow(session.client, batch, console, check=partial(served.check, session))
            if batch["status"] != "failed":
                batch = exporting.wait_for_export(session.client, batch, console)
        except KeyboardInterrupt:
            goes_on = "stops with the stack that this command started" if session.is_own else "goes on"
            raise CommandError(f"No longer watching: {batch_id} {goes_on}.", Exit.INTERRUPTED) from None
        if batch["status"] == "failed":
            outcome.tell_problems(batch, console)
        else:
            outcome.summary(batch, console, elapsed_s=outcome.elapsed_of(batch))
        console.result(batch)
    raise typer.Exit(outcome.exit_of(batch, allow_errors))


@grouped
def list_batches(
    *,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100, help="At most so many.")] = 20,
    after: Annotated[str | None, typer.Option("--after", metavar="BATCH", help="Older than this one.")] = None,
    server: ServerOptions,
) -> None:
    """List batches, newest first."""
    console = server.console
    with server.opened(roles=READING, purpose="list") as session:
        page = session.client.batches(limit=limit, after=after)
    console.result(page)
    console.table(
        [_row(batch) for batch in page["data"]], ("id", "status", "lines", "failed", "cost", "created", "name")
    )


@grouped
def show(
    batch_id: BatchArgument,
    server: ServerOptions,
) -> None:
    """Show one batch."""
    console = server.console
    with server.opened(roles=READING, purpose="show") as session:
        batch = session.client.batch(batch_id)
    console.result(batch)
    if batch["status"] == "failed" and not console.as_json:
        outcome.tell_problems(batch, console)
        return
    outcome.summary(batch, console, elapsed_s=outcome.elapsed_of(batch))
    runs, ends = batch.get("scheduled_for"), batch.get("estimated_completion_at")
    share = (batch.get("progress") or {}).get("share")
    extra = {
        "Name": batch.get("name"),
        "Model": batch.get("model") or " and ".join(batch.get("models") or ()),
        "Priority": batch.get("priority"),
        "Progress": f"{math.floor(100 * share)} %" if share is not None else None,
        "Ends": " to ".join(outcome.local_time(ends[end]) for end in ("low", "high")) if ends else None,
        "At risk": "the deadline" if batch.get("at_risk") else None,
        "Most it may cost": format_dollars(most) if (most := batch.get("max_cost_nanos")) is not None else None,
        "Lines over it": batch.get("lines_over_budget"),
        "Waiting for": batch.get("waiting_for"),
        "Results in S3": exporting.shown(batch),
        "Starts": outcome.local_time(runs) if runs else None,
    }
    console.fields({name: value for name, value in extra.items() if value})


@grouped
def cancel(
    batch_id: BatchArgument,
    server: ServerOptions,
) -> None:
    """Cancel a batch; what is finished is kept and billed."""
    console = server.console
    with server.opened(roles=CANCELLING, purpose="cancel") as session:
        batch = session.client.cancel(batch_id)
        deadline = time.monotonic() + _CANCEL_S
        while batch["status"] == "cancelling" and time.monotonic() < deadline:
            time.sleep(0.3)
            batch = session.client.batch(batch_id)
    console.out(f"{batch_id} is {batch['status']}.")
    console.result(batch)


def _row(batch: dict[str, Any]) -> dict[str, object]:
    counts, usage = batch.get("request_counts") or {}, batch.get("usage") or {}
    return {
        "id": batch["id"],
        "status": batch["status"],
        "lines": f"{counts.get('completed', 0) + counts.get('failed', 0):,}/{counts.get('total', 0):,}",
        "failed": f"{counts.get('failed', 0):,}",
        "cost": format_dollars(usage["cost_nanos"]) if "cost_nanos" in usage else "",
        "created": outcome.local_time(batch["created_at"]),
        "name": batch.get("name") or "",
    }
