"""What a command prints: results on standard output, everything else on standard error, plain unless on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Console:
    """The two streams of one command. With `as_json`, standard output carries one JSON document and nothing else."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.is_live = is_live(os.environ)

    def say(self, text: str) -> None:
        """A sentence of progress or a note, on standard error."""
        self._write(sys.stderr, text)

    def out(self, text: str) -> None:
        """Text for people on standard output; silent with --json."""
        if not self.as_json:
            self._write(sys.stdout, text)

    def result(self, value: object) -> None:
        """The document of --json; silent without it."""
        if self.as_json:
            self._write(sys.stdout, json.dumps(value, indent=2, ensure_ascii=False))

    def table(self, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
        """Rows as aligned text; the columns' names are the head."""
        cells = [list(columns), *([str(row.get(name, "")) for name in columns] for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        for row in cells:
            self.out("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def fields(self, values: Mapping[str, Any]) -> None:
        """Names and values, one a line."""
        width = max(map(len, values), default=0)
        for name, value in values.items():
            self.out(f"{name.ljust(width)}  {value}")

    def _write(self, stream: Any, text: str) -> None:
        stream.write(text.encode(stream.encoding or "utf-8", "replace").decode(stream.encoding or "utf-8") + "\n")
        stream.flush()


def is_live(env: Mapping[str, str]) -> bool:
    """Whether standard error may be painted on: a terminal, and nobody asked for plain text."""
    return sys.stderr.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
