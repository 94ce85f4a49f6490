"""Runs `python -m engine.…` for commands that need torch: a process that tells JSON lines, the last one its answer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from batchsvc.cli.exits import CommandError, Exit

_PATIENCE_S = 60.0


def ask(
    module: str, argv: Sequence[str], told: Callable[[dict[str, Any]], None], *, killed: str | None = None
) -> dict[str, Any]:
    """The last line of such a process; `told` gets those before. Raises CommandError with the sentence of one that
    failed or stopped; `killed` is that of one that the system has killed."""
    last: dict[str, Any] | None = None
    with _running([sys.executable, "-P", "-m", module, *argv]) as (lines, process):
        for line in lines:
            if last is not None:
                told(last)
            last = json.loads(line)
        code = process.wait()
    if last is not None and "error" in last:
        raise CommandError(str(last["error"]), Exit.REFUSED)
    if last is not None and "stopped" in last:
        raise CommandError(str(last["stopped"]), Exit.INTERRUPTED)
    if code == -signal.SIGKILL and killed is not None:
        raise CommandError(killed)
    if code != 0 or last is None:
        raise CommandError(f"The process of {module} ended with code {code} and no answer.")
    return last


@contextmanager
def _running(command: list[str]) -> Iterator[tuple[Iterator[str], subprocess.Popen[str]]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None, "its output is a pipe"
        try:
            yield iter(process.stdout), process
        except BaseException:
            process.terminate()
            try:
                process.wait(_PATIENCE_S)  # it may have something to save
            except subprocess.TimeoutExpired:
                process.kill()
            raise
