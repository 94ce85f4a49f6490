"""The exit codes of every command, in one table that --help shows, and the errors that lead to them."""

from __future__ import annotations

import re
from enum import IntEnum


class Exit(IntEnum):
    """What a script can rely on."""

    OK = 0
    FAILED = 1
    USAGE = 2
    ERROR_LINES = 3
    REFUSED = 4
    ENDED_EARLY = 5
    UNREACHABLE = 6
    INTERRUPTED = 130


TABLE = {
    Exit.OK: "done; of a batch: every line answered",
    Exit.FAILED: "the command failed",
    Exit.USAGE: "wrong usage",
    Exit.ERROR_LINES: "the batch finished with error lines (more than --allow-errors)",
    Exit.REFUSED: "the input was refused",
    Exit.ENDED_EARLY: "the batch expired, was cancelled or went over budget",
    Exit.UNREACHABLE: "the server can't be reached",
    Exit.INTERRUPTED: "Ctrl-C",
}


class CommandError(Exception):
    """Ends a command with one sentence on standard error and an exit code."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class ApiError(CommandError):
    """A server answered with an error envelope; its message is the sentence."""

    def __init__(self, message: str, code: Exit, *, status: int) -> None:
        super().__init__(message, code)
        self.status = status


def help_table() -> str:
    """The table as text for --help."""
    rows = "\n".join(f"  {code.value:>3}  {text}" for code, text in TABLE.items())
    return f"\b\nExit codes:\n{rows}"


def allowed_errors(text: str | None, total: int) -> int:
    """How many error lines `--allow-errors N|P%` accepts of `total` lines. Raises CommandError for another form."""
    if text is None:
        return 0
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)(%?)", text.strip(), re.ASCII)
    if not found or (not found[2] and "." in found[1]) or (found[2] and float(found[1]) > 100):
        raise CommandError(
            f"--allow-errors takes a number of lines or a percentage such as 2%, not {text!r}.", Exit.USAGE
        )
    if not found[2]:
        return int(found[1])
    whole, _, fraction = found[1].partition(".")
    parts = int(whole + fraction) if fraction else int(whole)
    return total * parts // int("100" + "0" * len(fraction))
