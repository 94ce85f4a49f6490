"""`batchsvc topup|payment|refund|credit`: what an operator posts to a project's account, each once a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchsvc.cli.money import opened_money
from batchsvc.cli.options import AdminOptions, ProjectArgument, grouped
from batchsvc.money import format_dollars

if TYPE_CHECKING:
    from batchsvc.billing.ledger import Movement

AmountArgument = Annotated[str, typer.Argument(metavar="DOLLARS", help="The amount, such as 12.50.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it stands in the ledger for ever.")]
OnceOption = Annotated[
    str, typer.Option("--key", metavar="KEY", help="A name for this posting: the same one again changes nothing.")
]
ForBatchOption = Annotated[str | None, typer.Option("--batch", metavar="BATCH", help="The batch that it is for.")]


@grouped
def topup(
    project: ProjectArgument,
    amount: AmountArgument,
    reason: ReasonOption,
    key: OnceOption,
    server: AdminOptions,
) -> None:
    """Add money that a prepaid project may spend."""
    body = {"amount": amount, "reason": reason, "key": key}
    _post(server, "topup", project, body)


@grouped
def payment(
    project: ProjectArgument,
    amount: AmountArgument,
    reason: ReasonOption,
    key: OnceOption,
    server: AdminOptions,
) -> None:
    """Note that money came for what was invoiced."""
    body = {"amount": amount, "reason": reason, "key": key}
    _post(server, "payment", project, body)


@grouped
def refund(
    *,
    project: ProjectArgument,
    amount: AmountArgument,
    reason: ReasonOption,
    key: OnceOption,
    batch_id: ForBatchOption = None,
    server: AdminOptions,
) -> None:
    """Take a charge back: never more than was charged, less earlier refunds."""
    body = {"amount": amount, "reason": reason, "key": key, "batch_id": batch_id}
    _post(server, "refund", project, body)


@grouped
def credit(
    *,
    project: ProjectArgument,
    amount: AmountArgument,
    reason: ReasonOption,
    key: OnceOption,
    batch_id: ForBatchOption = None,
    server: AdminOptions,
) -> None:
    """Give a project money without a charge behind it."""
    body = {"amount": amount, "reason": reason, "key": key, "batch_id": batch_id}
    _post(server, "credit", project, body)


def _post(server: AdminOptions, kind: Movement, project: str, body: dict[str, Any]) -> None:
    console = server.console
    with opened_money(server) as money:
        made = money.post(kind, project, body)
    names = f" It corrects {made['corrects']}." if made.get("corrects") else ""
    was = "" if made["is_new"] else " It was posted before, and this call changed nothing."
    console.out(
        f"{made['id']}: a {kind} of {made['amount']} for {made['project_id']}, "
        f"which has {format_dollars(made['available_nanos'])} available.{names}{was}"
    )
    console.result(made)
