"""`batchsvc statement`: a project's account over a month."""

from __future__ import annotations

from typing import Annotated

import typer

from batchsvc.cli.books import opened_books
from batchsvc.cli.console import Console
from batchsvc.cli.invoice import ProjectArgument
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption, KeyOption, UrlOption
from batchsvc.cli.outcome import local_time
from batchsvc.money import format_dollars


def statement(
    project: ProjectArgument,
    month: Annotated[str, typer.Option("--month", metavar="YYYY-MM", help="The month, in UTC.")],
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a project's balance at the start of a month, all that moved it, and the balance at its end."""
    console = Console(as_json=as_json)
    with opened_books(data_dir, url, api_key, from_env=from_env) as books:
        found = books.statement(project, month)
    rows = [
        {
            "time": local_time(row["last_at"]),
            "movement": row["kind"] if row["postings"] == 1 else f"{row['kind']} x {row['postings']:,}",
            "of": row["batch_id"] or row["reason"] or row["key"],
            "amount": format_dollars(row["amount_nanos"]),
        }
        for row in found["movements"]
    ]
    console.out(f"{found['project']} ({found['project_id']}), {found['month']}")
    console.out(f"Opening balance {format_dollars(found['opening_nanos'])}")
    console.table(rows, ("time", "movement", "of", "amount"))
    console.out(f"Closing balance {format_dollars(found['closing_nanos'])}")
    console.result(found)
