"""All commands under one name, with the table of exit codes in --help."""

from __future__ import annotations

from typing import Annotated

import typer

from batchsvc.cli import (
    admin_keys,
    again,
    alerts,
    batches,
    claims,
    config,
    db,
    deletion,
    deploy,
    doctor,
    invoice,
    jobs,
    keys,
    lifecycle,
    limits,
    models,
    movements,
    operate,
    prices,
    projects,
    quarantine,
    serve,
    service_accounts,
    statement,
    stores,
    usage,
    webhooks,
    workers,
)
from batchsvc.cli.audit import audit
from batchsvc.cli.backup import backup, restore
from batchsvc.cli.exits import help_table
from batchsvc.cli.explain import explain
from batchsvc.cli.quote import quote
from batchsvc.cli.reconcile import reconcile
from batchsvc.cli.results import results
from batchsvc.cli.run import run
from batchsvc.cli.stops import help_table as stops_table
from batchsvc.cli.top import top

app = typer.Typer(
    name="batchsvc",
    help="Batch inference as a service: bulk jobs in, results and an exact bill out.\n\n"
    "Start with: batchsvc run FILE.jsonl",
    epilog=f"{help_table()}\n\n{stops_table()}",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"batchsvc {version('batchsvc')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the program itself; `_version` has done all there is to do."""


app.command()(run)
app.command()(quote)
app.command()(jobs.submit)
app.command()(jobs.watch)
app.command("list")(jobs.list_batches)
app.command()(jobs.show)
app.command()(results)
app.command(epilog=stops_table())(jobs.cancel)
app.command(epilog=stops_table())(again.pause)
app.command(epilog=stops_table())(again.resume)
app.command(epilog=stops_table())(again.retry)
app.command("continue", epilog=stops_table())(again.continue_)
app.command()(deletion.delete)
app.command()(lifecycle.up)
app.command()(lifecycle.down)
app.command()(lifecycle.status)
app.command()(lifecycle.logs)
app.command()(top)
app.command()(doctor.doctor)
app.command()(alerts.alerts)
app.command()(usage.usage)
app.command()(usage.costs)
app.command()(statement.statement)
app.command()(explain)
app.command()(reconcile)
app.command()(movements.topup)
app.command()(movements.payment)
app.command()(movements.refund)
app.command()(movements.credit)
app.command()(backup)
app.command()(restore)
app.command()(serve.serve)
app.command()(serve.migrate)
app.add_typer(db.app, name="db")
app.add_typer(models.app, name="models")
app.add_typer(projects.app, name="projects")
app.add_typer(keys.app, name="keys")
app.add_typer(service_accounts.app, name="service-accounts")
app.add_typer(admin_keys.app, name="admin-keys")
app.add_typer(limits.app, name="limits")
app.command()(audit)
operate.app.add_typer(stores.app, name="stores")
operate.app.command("delete")(deletion.delete_any)
operate.app.command()(deletion.retention)
app.add_typer(operate.app, name="admin")
app.add_typer(invoice.app, name="invoice")
app.add_typer(config.app, name="config")
app.add_typer(deploy.app, name="deploy")
app.add_typer(prices.app, name="prices")
app.add_typer(batches.app, name="batches")
app.add_typer(claims.app, name="claims")
app.add_typer(quarantine.app, name="quarantine")
app.add_typer(workers.app, name="workers")
app.add_typer(webhooks.app, name="webhooks")
