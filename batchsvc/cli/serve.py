"""`serve` and `migrate`: the single processes of a deployment, which read DATABASE_URL and the other settings."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from batchsvc.cli.console import Console

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


def migrate() -> None:
    """Bring DATABASE_URL to this version's schema and seed the price book: `db upgrade --from-env`."""
    from batchsvc.cli.db import bring_up
    from batchsvc.db.migrate import schema_of
    from batchsvc.settings import Settings

    url = Settings.from_env().database_url
    before = schema_of(url)
    bring_up(url, before)
    Console().out(f"The database is at revision {before.head}.")
