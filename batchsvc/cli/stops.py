"""What goes on after a stop, in one table that --help and README show."""

from __future__ import annotations

from textwrap import wrap
from typing import NamedTuple


class Stop(NamedTuple):
    """Something that stopped, what becomes of the work, and how it goes on."""

    what: str
    state: str
    goes_on: str


_KEPT = "finished lines are delivered and billed"
_REST = "`continue` (the lines that never ran), `retry` (all without an answer)"

TABLE = (
    Stop("Ctrl-C in `run` or `watch`", "the batch goes on, unless the command had started the stack itself", "`watch`"),
    Stop("Ctrl-C in `results --follow -o F`", "the batch goes on, F has all lines so far", "the same command again"),
    Stop("a worker, a server or the whole stack ends", "finished lines are kept", "by itself, when it runs again"),
    Stop("`pause`", "it stays in_progress and its deadline stays; running lines are saved", "`resume`"),
    Stop("`cancel`", _KEPT, _REST),
    Stop("the deadline passes (expired)", _KEPT, _REST),
    Stop("the batch ends with error lines", "they cost nothing", "`retry` (all lines that have an error)"),
    Stop("the input is refused (failed)", "nothing has run", "correct it and `run` it"),
)


def help_table() -> str:
    """The table as text for --help."""
    rows = []
    for stop in TABLE:
        rows += wrap(f"{stop.what}: {stop.state}; then: {stop.goes_on}", 104, subsequent_indent="    ")
    text = "\n".join(f"  {row}" for row in rows).replace("`", "")
    return f"\b\nAfter a stop:\n{text}"


def readme_rows() -> list[str]:
    """The rows of the table in README."""
    return [f"| {stop.what} | {stop.state} | {stop.goes_on} |" for stop in TABLE]
