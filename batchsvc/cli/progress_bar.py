"""How far a process of several phases is: a bar with loss and time left on a terminal, else lines now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from batchsvc.cli.console import Console

_PLAIN_EVERY_S = 15.0
_NAMES = {
    "answers": "The teacher answers",
    "capture": "The teacher scores",
    "train": "Training",
    "report": "Measuring",
}

Told = Callable[[dict[str, Any]], None]


@contextmanager
def shown_phases(console: Console) -> Iterator[Told]:
    """What takes the lines of such a process: `say` with a sentence, or `phase` with `done`, `total` and more."""
    if not console.is_live:
        yield _lines(console)
        return
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[numbers]}"))
    with Progress(*columns, console=RichConsole(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, numbers="")

        def told(line: dict[str, Any]) -> None:
            if "say" in line:
                bar.console.print(line["say"], highlight=False, markup=False)
                return
            name = _NAMES.get(line["phase"], line["phase"])
            bar.update(task, description=name, total=line["total"], completed=line["done"], numbers=numbers(line))

        yield told


def _lines(console: Console) -> Told:
    phase, told_s = "", 0.0

    def told(line: dict[str, Any]) -> None:
        nonlocal phase, told_s
        if "say" in line:
            console.say(line["say"])
            return
        is_end = line["done"] == line["total"]
        if line["phase"] != phase or is_end or time.monotonic() - told_s > _PLAIN_EVERY_S:
            phase, told_s = line["phase"], time.monotonic()
            console.say(f"{_NAMES.get(phase, phase)}: {numbers(line)}")

    return told


def numbers(line: dict[str, Any]) -> str:
    """As words: `120 of 800, loss 1.23, 14 min left`."""
    parts = [f"{line['done']:,}" + (f" of {line['total']:,}" if line["total"] else "")]
    if line.get("loss") is not None:
        parts.append(f"loss {line['loss']:.3f}")
    left = line.get("eta_s")
    if left is not None:
        parts.append(f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left")
    return ", ".join(parts)
