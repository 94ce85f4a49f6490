"""`batchsvc prices`: the versions of the price book."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.money import opened_money
from batchsvc.cli.options import AdminOptions, grouped
from batchsvc.cli.outcome import local_time
from batchsvc.money import format_dollars, parse_dollars

app = typer.Typer(no_args_is_help=True, help="The price book: import, list, set.", rich_markup_mode=None)

FromOption = Annotated[
    str | None, typer.Option("--from", metavar="DATE", help="When it comes into force, in UTC (default: now).")
]
_PRICE = "Dollars per million tokens, such as 0.02."


@app.command("import")
@grouped
def import_prices(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help='JSON: {"models": {MODEL: {TIER: {KIND: nanos}}}}.')],
    from_text: FromOption = None,
    server: AdminOptions,
) -> None:
    """Add a whole price book as a new version, in nano-dollars per million tokens."""
    console = server.console
    body = {**_read(file), **({"from": from_text} if from_text else {})}
    with opened_money(server) as money:
        _tell(console, money.import_prices(body))


@app.command("list")
@grouped
def list_prices(
    *,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="This version (default: the one in force).")
    ] = None,
    server: AdminOptions,
) -> None:
    """List the versions of the price book, and the prices of one of them."""
    console = server.console
    with opened_money(server) as money:
        page = money.versions()
        book = money.book("current" if version is None else str(version))
    console.result({**book, "versions": page["data"]})
    rows = [
        {
            "version": row["version"],
            "from": local_time(row["effective_at"]),
            "in force": "yes" if row["is_in_force"] else "",
        }
        for row in page["data"]
    ]
    console.table(rows, ("version", "from", "in force"))
    console.out(f"\nVersion {book['version']}, dollars per million tokens:")
    prices = [
        {"model": model, "tier": tier, **{kind: format_dollars(nanos) for kind, nanos in row.items()}}
        for model, tiers in book["models"].items()
        for tier, row in tiers.items()
    ]
    console.table(prices, ("model", "tier", "input", "cached_input", "output"))


@app.command("set")
@grouped
def set_price(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, or default for those without prices.")],
    tier: Annotated[str, typer.Argument(metavar="TIER", help="standard, or batch_24h for the window 24h, and so on.")],
    input_price: Annotated[str, typer.Option("--input", metavar="P", help=_PRICE)],
    cached_price: Annotated[str, typer.Option("--cached-input", metavar="P", help=_PRICE)],
    output_price: Annotated[str, typer.Option("--output", metavar="P", help=_PRICE)],
    from_text: FromOption = None,
    server: AdminOptions,
) -> None:
    """Change one row: a new version that is otherwise the book in force. Batches keep the prices they began with."""
    console = server.console
    body: dict[str, Any] = {"model": model, "tier": tier, **({"from": from_text} if from_text else {})}
    for kind, text in (("input", input_price), ("cached_input", cached_price), ("output", output_price)):
        nanos = parse_dollars(text)
        if nanos is None or nanos < 0:
            option = f"--{kind.replace('_', '-')}"
            raise CommandError(
                f"{option} can't be {text!r}: it is dollars per million tokens, 0 or more, exact to a nano-dollar.",
                Exit.USAGE,
            )
        body[kind] = nanos
    with opened_money(server) as money:
        _tell(console, money.set_price(body))


def _tell(console: Console, book: dict[str, Any]) -> None:
    console.out(f"Version {book['version']} of the price book is in force from {local_time(book['effective_at'])} on.")
    console.result(book)


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise CommandError(f"{file} can't be read: {error.strerror}.") from error
    except ValueError as error:
        raise CommandError(f"{file} is no JSON: {error}.", Exit.REFUSED) from error
    if not isinstance(data, dict):
        raise CommandError(f"{file} is no price book: it must be a JSON object with `models`.", Exit.REFUSED)
    return data
