"""`batchsvc reconcile`: add up again what was billed, from the stored lines to the invoices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from batchsvc.cli.options import DataDirOption, FromEnvOption, JsonOption
from batchsvc.cli.target import opened, select
from batchsvc.stack.options import READING, StackOptions

if TYPE_CHECKING:
    from batchsvc.batches.reconcile_run import Auditor
    from batchsvc.settings import Settings


def reconcile(
    batch: Annotated[str | None, typer.Option("--batch", metavar="BATCH", help="This batch alone.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All batches, the ledger, balances and invoices (the default).")
    ] = False,
    data_dir: DataDirOption = None,
    from_env: FromEnvOption = False,
    as_json: JsonOption = False,
) -> None:
    """Add up output files, parts, usage, ledger and invoices again; exit 1 if one nano-dollar differs.

    It reads the database and the store themselves, so it runs where they are. Nothing is changed.
    """
    console = Console(as_json=as_json)
    if batch is not None and everything:
        raise CommandError("Name either --batch or --all, not both.", Exit.USAGE)
    with _opened(data_dir, console, from_env=from_env) as auditor:
        report = auditor.everything() if batch is None else auditor.batch(batch)
    if report is None:
        raise CommandError(f"There is no batch {batch}.")
    for note in report.notes:
        console.out(note)
    for difference in report.differences:
        console.out(str(difference))
    if (hidden := report.num_differences - len(report.differences)) > 0:
        console.out(f"And {hidden:,} more.")
    console.result(report.as_json())
    counted = (
        f"{report.batches:,} batches, {report.lines:,} lines, {report.parts:,} parts, {report.invoices:,} invoices"
    )
    if report.num_differences:
        console.out(f"{counted}: {report.num_differences:,} differences.")
        raise typer.Exit(Exit.FAILED)
    console.out(f"{counted}: no difference.")


@contextmanager
def _opened(data_dir: Path | None, console: Console, *, from_env: bool) -> Iterator[Auditor]:
    """The deployment of the environment, or that of a data directory; a stack that doesn't run is started to read."""
    from batchsvc.settings import Settings

    if from_env:
        if data_dir is not None:
            raise CommandError("--from-env names a deployment of its own: leave --data-dir out.", Exit.USAGE)
        with _auditing(Settings.from_env()) as auditor:
            yield auditor
        return
    target = select(data_dir, None, None, {})
    with opened(target, console, roles=READING, purpose="reconcile"):
        assert target.directory is not None, "no server was named"
        from batchsvc.stack.children import Secrets, service_env

        directory = target.directory
        options, ports = StackOptions(root=directory.root), directory.read_json("ports.json")
        env = service_env(directory, options, ports, Secrets.of(directory))
        with _auditing(Settings.from_env(env)) as auditor:
            yield auditor


@contextmanager
def _auditing(settings: Settings) -> Iterator[Auditor]:
    from sqlalchemy.exc import DBAPIError

    from batchsvc.batches.reconcile_run import Auditor
    from batchsvc.store.s3 import ObjectStore

    auditor = Auditor(settings.database_url, ObjectStore(settings))
    try:
        yield auditor
    except DBAPIError as error:
        reason = str(error.orig).splitlines()[0].rstrip(".")
        raise CommandError(f"The database doesn't answer, or isn't migrated (`batchsvc migrate`): {reason}.") from error
    finally:
        auditor.close()
