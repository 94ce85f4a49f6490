"""Shows the licence of a model that is about to be pulled, and asks whether it is accepted."""

from __future__ import annotations

import sys

import typer

from batchsvc.cli.console import Console
from batchsvc.cli.exits import CommandError, Exit
from engine.load.wheels import Accept, Agreement


def asking(console: Console, *, is_accepted: bool) -> Accept:
    """Prints the text and, unless it is accepted beforehand, asks; where nobody can answer the command ends."""

    def accept(agreement: Agreement) -> bool:
        licence = agreement.licence
        console.say(f"{licence.name} ({licence.url})\n\n{agreement.text}\n")
        if is_accepted:
            return True
        if not sys.stdin.isatty():
            raise CommandError(
                f"{agreement.model} comes under the {licence.name} above; pull it with --accept-licence if you "
                "accept them.",
                Exit.USAGE,
            )
        return typer.confirm(f"Do you accept the {licence.name}?", err=True)

    return accept
