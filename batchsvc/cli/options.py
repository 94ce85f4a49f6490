"""Options that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataDirOption = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="D", help="The stack in this data directory (default: your user's own)."),
]
UrlOption = Annotated[str | None, typer.Option("--url", help="A server, together with --api-key.")]
KeyOption = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="The key for --url.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
AllowErrorsOption = Annotated[
    str | None,
    typer.Option("--allow-errors", metavar="N|P%", help="Error lines that still count as success."),
]
FromEnvOption = Annotated[
    bool,
    typer.Option("--from-env", help="The deployment of DATABASE_URL and the other settings, not a data directory."),
]
BatchArgument = Annotated[str, typer.Argument(metavar="BATCH", help="Id of the batch (batch_...).")]
