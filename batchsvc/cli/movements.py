"""`batchsvc topup|payment|refund|credit`: what an operator posts to a project's account, each once a key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.money import opened_money
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption, KeyOption, UrlOption
from batchsvc.money import format_dollars

if TYPE_CHECKING:
    from batchsvc.billing.ledger import Movement

ProjectArgument = Annotated[str, typer.Argument(metavar="PROJECT", help="Its id or its name.")]
AmountArgument = Annotated[str, typer.Argument(metavar="DOLLARS", help="The amount, such as 12.50.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it stands in the ledger for ever.")]
OnceOption = Annotated[
    str, typer.Option("--key", metavar="KEY", help="A name for this posting: the same one again changes nothing.")
]
ForBatchOption = Annotated[str | None, typer.Option("--batch", metavar="BATCH", help="The batch that it is for.")]


def topup(
    project: ProjectArgument,
    amount: AmountArgument,
    reason: ReasonOption,
    key: OnceOption,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add money that a prepaid project may spend."""
    body = {"amount": amount, "reason": reason, "key": key}
    _post("topup", project, body, data_dir, url, api_key, from_env=from_env, as_json=as_json)


def payment(
    project: ProjectArgument,
    amount: AmountArgument,
    reason: ReasonOption,
    key: OnceOption,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Note that money came for what was invoiced."""
    body = {"amount": amount, "reason": reason, "key": key}
    _post("payment", project, body, data_dir, url, api_key, from_env=from_env, as_json=as_json)


def refund(
    project: ProjectArgument,
    amount: AmountArgument,
    reason: ReasonOption,
    key: OnceOption,
    batch_id: ForBatchOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take a charge back: never more than was charged, less earlier refunds."""
    body = {"amount": amount, "reason": reason, "key": key, "batch_id": batch_id}
    _post("refund", project, body, data_dir, url, api_key, from_env=from_env, as_json=as_json)


def credit(
    project: ProjectArgument,
    amount: AmountArgument,
    reason: ReasonOption,
    key: OnceOption,
    batch_id: ForBatchOption = None,
    data_dir: DataDirOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Give a project money without a charge behind it."""
    body = {"amount": amount, "reason": reason, "key": key, "batch_id": batch_id}
    _post("credit", project, body, data_dir, url, api_key, from_env=from_env, as_json=as_json)


def _post(
    kind: Movement,
    project: str,
    body: dict[str, Any],
    data_dir: Path | None,
    url: str | None,
    api_key: str | None,
    *,
    from_env: bool,
    as_json: bool,
) -> None:
    console = Console(as_json=as_json)
    with opened_money(data_dir, url, api_key, from_env=from_env) as money:
        made = money.post(kind, project, body)
    names = f" It corrects {made['corrects']}." if made.get("corrects") else ""
    was = "" if made["is_new"] else " It was posted before, and this call changed nothing."
    console.out(
        f"{made['id']}: a {kind} of {made['amount']} for {made['project_id']}, "
        f"which has {format_dollars(made['available_nanos'])} available.{names}{was}"
    )
    console.result(made)
