"""`results`: what a batch has answered, as lines or as a table, at its end or while it runs."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchsvc.cli import following, merge, outcome, served, table_output
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit, allowed_errors
from batchsvc.cli.follow import ENDED
from batchsvc.cli.input_file import check_input
from batchsvc.cli.options import AllowErrorsOption, BatchArgument, ServerOptions, grouped
from batchsvc.cli.prompt import SchemaOption, schema_of
from batchsvc.cli.run import check_output
from batchsvc.stack.options import ALL, READING

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

_ORDERS = ("completion", "input")


@grouped
def results(
    *,
    batch_id: BatchArgument,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="F", help="Write to F: JSONL, or a table (.parquet, .csv, .tsv)."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            "--input", metavar="FILE", help="Write a table: beside the rows of FILE, which the batch was run on."
        ),
    ] = None,
    schema: SchemaOption = None,
    is_merged: Annotated[
        bool,
        typer.Option("--merged", help="Of a retry or continuation: one complete file, with the batches before it."),
    ] = False,
    is_followed: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Lines as they come, until the end; repeated with -o F it goes on in F."),
    ] = False,
    order: Annotated[
        str, typer.Option("--order", metavar="ORDER", help="Of --follow: completion, or input (waits for gaps).")
    ] = "completion",
    after: Annotated[
        str | None, typer.Option("--after", metavar="CURSOR", help="Of --follow: begin behind this line's cursor.")
    ] = None,
    allow_errors: AllowErrorsOption = None,
    server: ServerOptions,
) -> None:
    """Write the result lines of an ended batch, in input order; with --follow those of a running one, as they come.

    With --json and -o the batch object goes to standard output; without -o the result lines do.
    """
    console = server.console
    allowed_errors(allow_errors, 0)
    is_table = table is not None or schema is not None
    if is_table and output is None:
        raise CommandError("--input and --schema make a table: name its file with -o.", Exit.USAGE)
    if table is not None:
        check_input(table)
    schema_of(schema)
    if output is not None:
        table_output.check_name(output)
        is_table = is_table or table_output.is_table(output)
        check_output(output, table)
    if order not in _ORDERS:
        raise CommandError(f"--order can't be {order!r}: it is {' or '.join(_ORDERS)}.", Exit.USAGE)
    if is_followed and (is_table or is_merged):
        raise CommandError("--follow writes lines: a table, or --merged, is for a batch that has ended.", Exit.USAGE)
    if not is_followed and (after is not None or order != "completion"):
        raise CommandError("--after and --order belong to --follow.", Exit.USAGE)
    directory = server.target.directory
    if is_followed:
        model = served.model_of_batch(directory, batch_id) if directory else None
        with server.opened(roles=ALL, purpose="results", model=model) as session:
            check = partial(served.check, session)
            batch = following.follow_results(
                session.client, console, batch_id, output, order=order, after=after, check=check
            )
    else:
        with server.opened(roles=READING, purpose="results") as session:
            client = session.client
            batch = client.batch(batch_id)
            wanted = merge.chain(client, batch) if is_merged else [batch]
            _check_ended(wanted, console)
            if batch["status"] != "failed" or is_merged:
                _write(client, console, wanted, output, table, schema, is_table=is_table)
    if output is not None:
        console.result(batch)
    raise typer.Exit(outcome.exit_of(batch, allow_errors))


def _check_ended(wanted: list[dict[str, Any]], console: Console) -> None:
    for batch in wanted:
        if batch["status"] not in ENDED:
            raise CommandError(
                f"{batch['id']} is {batch['status']}: `batchsvc watch {batch['id']}` waits for its end, "
                f"`batchsvc results {batch['id']} --follow` gives its lines as they come."
            )
        if batch["status"] == "failed":
            outcome.tell_problems(batch, console)


def _write(
    client: Client,
    console: Console,
    wanted: list[dict[str, Any]],
    output: Path | None,
    table: Path | None,
    schema: Path | None,
    *,
    is_table: bool,
) -> None:
    first = wanted[0]  # it has had all lines of the input
    streams = [merge.results(client, batch) for batch in wanted]
    lines = merge.latest(streams) if len(streams) > 1 else streams[0]
    if output is not None and is_table:
        count = table_output.write_table(client, first, output, source=table, schema=schema, lines=lines)
        console.say(f"{count:,} rows are in {output}.")
    elif output is not None:
        count = merge.write_results(client, first, output, lines)
        console.say(f"{count:,} lines are in {output}.")
    else:
        for line in lines:
            sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
