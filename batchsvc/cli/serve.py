"""`serve` and `migrate`: the single processes of a deployment, which read DATABASE_URL and the other settings."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from batchsvc.cli.console import Console
from batchsvc.errors import UnavailableError

if TYPE_CHECKING:
    from batchsvc.db.migrate import Schema

_PAUSE_S = 1.0

_MODULES = {
    "api": ("batchsvc.app",),
    "control": ("workers", "control"),
    "engine": ("workers", "engine"),
}


def serve(
    process: Annotated[Literal["api", "control", "engine"], typer.Argument(help="Which process to be.")],
) -> None:
    """Become one process of a deployment: api, control or engine."""
    sys.stdout.flush()
    # -P: nothing in the current folder may pass for our code
    os.execv(sys.executable, [sys.executable, "-P", "-m", *_MODULES[process]])  # noqa: S606  argv is ours


def migrate(
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=0, help="How long the database may take to answer.")
    ] = 0,
) -> None:
    """Bring DATABASE_URL to this version's schema and seed the price book: `db upgrade --from-env`."""
    from batchsvc.cli.db import bring_up
    from batchsvc.settings import Settings

    url = Settings.from_env().database_url
    before = _schema(url, wait)
    bring_up(url, before)
    Console().out(f"The database is at revision {before.head}.")


def _schema(url: str, wait_s: float) -> Schema:
    """Where the database stands, once it answers. Raises UnavailableError if it doesn't within that time."""
    from batchsvc.db.migrate import schema_of

    until_s = time.monotonic() + wait_s
    is_told = False
    while True:
        try:
            return schema_of(url)
        except UnavailableError as error:
            if time.monotonic() >= until_s:
                raise
            if not is_told:
                Console().say(f"{error.message} Waiting for {wait_s:g} s.")
                is_told = True
        time.sleep(_PAUSE_S)
