"""`batchsvc invoice`: from a month's usage to an issued invoice, its payment and its corrections."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchsvc.cli.books import opened_books
from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import AdminOptions, ProjectArgument, grouped
from batchsvc.money import format_dollars

if TYPE_CHECKING:
    from batchsvc.billing.invoice_api import Action

app = typer.Typer(
    no_args_is_help=True,
    help="Invoices: draft a month, issue it, book what follows.",
    rich_markup_mode=None,
)

InvoiceArgument = Annotated[str, typer.Argument(metavar="INVOICE", help="Its number, or the id of a draft.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it stays with the invoice.")]
_FORMATS = ("html", "pdf", "csv")


@app.command()
@grouped
def party(
    *,
    project: ProjectArgument,
    name: Annotated[str | None, typer.Option("--name", help="Name on the invoice; default: the project's.")] = None,
    address: Annotated[str | None, typer.Option("--address", help="Address; its lines are separated by ;")] = None,
    country: Annotated[str | None, typer.Option("--country", help="Country (ISO 3166), such as FR.")] = None,
    tax_id: Annotated[str | None, typer.Option("--tax-id", help="Tax id of the buyer.")] = None,
    currency: Annotated[str | None, typer.Option("--currency", help="Currency (ISO 4217), such as EUR.")] = None,
    tax_rate: Annotated[
        str | None, typer.Option("--tax-rate", metavar="PERCENT", help="Tax, or default for the seller's.")
    ] = None,
    reverse_charge: Annotated[
        bool | None, typer.Option("--reverse-charge/--no-reverse-charge", help="The buyer is liable for the tax.")
    ] = None,
    bill_to: Annotated[
        str | None, typer.Option("--bill-to", metavar="PROJECT", help="The project that pays; self for itself.")
    ] = None,
    server: AdminOptions,
) -> None:
    """Say to whom a project is billed, and on which terms; without options, show it."""
    console = server.console
    given = {
        "name": name,
        "address": address,
        "country": None if country is None else country.upper(),
        "tax_id": tax_id,
        "currency": None if currency is None else currency.upper(),
        "is_reverse_charge": reverse_charge,
    }
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if tax_rate is not None:
        changes["tax_rate"] = None if tax_rate == "default" else tax_rate
    if bill_to is not None:
        changes["bill_to"] = None if bill_to == "self" else bill_to
    with opened_books(server) as books:
        shown = books.party(project, changes)
    console.fields({field: "" if value is None else value for field, value in shown.items() if field != "object"})
    console.result(shown)


@app.command()
@grouped
def draft(
    *,
    project: ProjectArgument,
    month: Annotated[str, typer.Option("--month", metavar="YYYY-MM", help="The month, in UTC.")],
    exchange_rate: Annotated[
        str | None,
        typer.Option("--exchange-rate", metavar="R", help="What a dollar is worth in the invoice's currency."),
    ] = None,
    server: AdminOptions,
) -> None:
    """Add up a month. A draft has no number and may be made again."""
    console = server.console
    with opened_books(server) as books:
        made = books.draft({"project": project, "month": month, "exchange_rate": exchange_rate})
    _show(console, made)
    console.say(f"`batchsvc invoice issue {made['id']}` issues it.")


@app.command()
@grouped
def issue(
    invoice: Annotated[str, typer.Argument(metavar="DRAFT", help="The draft's id (inv_...).")],
    server: AdminOptions,
) -> None:
    """Issue a draft under the next number; it never changes after that."""
    _act(server, "issue", invoice, {})


@app.command()
@grouped
def pay(
    *,
    invoice: InvoiceArgument,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Such as the bank's reference.")
    ] = None,
    server: AdminOptions,
) -> None:
    """Book the payment of all that is owed on an invoice."""
    _act(server, "pay", invoice, {"reason": reason})


@app.command()
@grouped
def void(
    invoice: InvoiceArgument,
    reason: ReasonOption,
    server: AdminOptions,
) -> None:
    """Take an unpaid invoice back as a whole; its month can be drafted again."""
    _act(server, "void", invoice, {"reason": reason})


@app.command()
@grouped
def dispute(
    invoice: InvoiceArgument,
    reason: ReasonOption,
    server: AdminOptions,
) -> None:
    """Note that an invoice is disputed; it can still be paid, credited or made void."""
    _act(server, "dispute", invoice, {"reason": reason})


@app.command("credit-note")
@grouped
def credit_note(
    *,
    invoice: InvoiceArgument,
    reason: ReasonOption,
    amount: Annotated[
        str | None, typer.Option("--amount", help="In the invoice's currency, tax included; default: all that is left.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="The same key again makes no second credit note.")] = None,
    server: AdminOptions,
) -> None:
    """Correct an issued invoice by a credit note with a number of its own."""
    body = {"reason": reason, "amount": amount, "key": key}
    _act(server, "credit_note", invoice, body)


@app.command("list")
@grouped
def list_invoices(
    *,
    project: Annotated[str | None, typer.Option("--project", metavar="P", help="Only those of this project.")] = None,
    month: Annotated[str | None, typer.Option("--month", metavar="YYYY-MM", help="Only those of this month.")] = None,
    status: Annotated[str | None, typer.Option("--status", help="draft, issued, paid, void or disputed.")] = None,
    server: AdminOptions,
) -> None:
    """List invoices and credit notes, oldest first."""
    console = server.console
    filters = {"project": project, "month": month, "status": status}
    with opened_books(server) as books:
        page = books.listing({name: value for name, value in filters.items() if value is not None})
    console.result(page)
    rows = [
        {**row, "number": row["number"] or row["id"], "payable": f"{row['payable']} {row['currency']}"}
        for row in page["data"]
    ]
    console.table(rows, ("number", "month", "project_id", "status", "payable", "corrects"))


@app.command()
@grouped
def show(
    *,
    invoice: InvoiceArgument,
    form: Annotated[str | None, typer.Option("--format", help="Write it as html, pdf or csv.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; default: standard output.")
    ] = None,
    server: AdminOptions,
) -> None:
    """Show an invoice, or write it as a file; the CSV has a row for every part that it bills."""
    console = server.console
    if output is not None and form is None:
        form = output.suffix.removeprefix(".").lower()
    if form is not None and form not in _FORMATS:
        raise CommandError(f"--format can't be {form!r}: it is html, pdf or csv.", Exit.USAGE)
    with opened_books(server) as books:
        if form is None:
            _show(console, books.show(invoice))
            return
        with books.content(invoice, form) as chunks:
            if output is None:
                sys.stdout.buffer.writelines(chunks)
                sys.stdout.buffer.flush()
                return
            with output.open("wb") as file:
                file.writelines(chunks)
    console.say(f"Wrote {output}.")


def _act(server: AdminOptions, action: Action, invoice: str, body: dict[str, Any]) -> None:
    with opened_books(server) as books:
        _show(server.console, books.act(invoice, action, body))


def _show(console: Console, row: dict[str, Any]) -> None:
    name = "Credit note" if row["object"] == "credit_note" else "Invoice"
    corrects = f", corrects {row['corrects']}" if row["corrects"] else ""
    console.out(
        f"{name} {row['number'] or row['id']}, {row['status']}{corrects}: {row['month']} of {row['buyer']['name']}"
    )
    rows = [
        {
            "model": line["model"],
            "tier": line["tier"],
            "item": line["kind"] + (f", corrects {line['corrects']}" if line["corrects"] else ""),
            "tokens": f"{line['tokens']:,}" if line["tokens"] else "",
            "amount": format_dollars(line["amount_nanos"]),
        }
        for line in row["lines"]
    ]
    console.table(rows, ("model", "tier", "item", "tokens", "amount"))
    console.fields(
        {
            "net": format_dollars(row["net_nanos"]),
            f"tax {row['tax_rate']} %": f"{row['tax']} {row['currency']}",
            "rounding": f"{row['rounding']} {row['currency']}",
            "payable": f"{row['payable']} {row['currency']}",
        }
    )
    console.result(row)
