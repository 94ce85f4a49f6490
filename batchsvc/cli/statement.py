"""`batchsvc statement`: a project's account over a month."""

from __future__ import annotations

from typing import Annotated

import typer

from batchsvc.cli.books import opened_books
from batchsvc.cli.options import AdminOptions, ProjectArgument, grouped
from batchsvc.cli.outcome import local_time
from batchsvc.money import format_dollars


@grouped
def statement(
    project: ProjectArgument,
    month: Annotated[str, typer.Option("--month", metavar="YYYY-MM", help="The month, in UTC.")],
    server: AdminOptions,
) -> None:
    """Show a project's balance at the start of a month, all that moved it, and the balance at its end."""
    console = server.console
    with opened_books(server) as books:
        found = books.statement(project, month)
    rows = [
        {
            "time": local_time(row["last_at"]),
            "movement": row["kind"] if row["postings"] == 1 else f"{row['kind']} x {row['postings']:,}",
            "of": row["batch_id"] or row["reason"] or row["key"] or "",
            "amount": format_dollars(row["amount_nanos"]),
        }
        for row in found["movements"]
    ]
    console.out(f"{found['project']} ({found['project_id']}), {found['month']}")
    console.out(f"Opening balance {format_dollars(found['opening_nanos'])}")
    console.table(rows, ("time", "movement", "of", "amount"))
    console.out(f"Closing balance {format_dollars(found['closing_nanos'])}")
    console.result(found)
