"""Failpoints: places in the code where a test lets a process die, stop, wait or fail.

`reach("part.stored")` stands where something was just done. Unless the environment arms that name it costs one lookup
in an empty dictionary. `BATCHSVC_FAILPOINTS="part.stored=kill@3;unit.claimed=sleep:2"` arms by name:

    kill        the process ends as by kill -9        stop        it stops as by SIGSTOP, all threads of it
    raise       FailpointError in this thread         sleep:S     this thread sleeps S seconds
    wait:PATH   this thread waits for a file          hang        this thread never goes on

`@N` acts on the N-th pass alone; without it every pass acts. A pass through an armed name is noted in the file that
`BATCHSVC_FAILPOINTS_LOG` names, one line "pid name pass", so that a test knows that its fault did happen.

Names are `noun.past`, as log events are; a new one gets its line here:

    api        file.stored       an upload's object is complete, its row isn't written
               batch.created     a batch's row is committed, no hint was sent
               batch.hinted      the hint is on its way, the caller has no answer
    planner    plan.claimed      the plan lease is taken
               import.stored     an input's copy is complete, its row doesn't know
               window.stored     a window's objects are stored, nothing counts
               window.planned    a window counts
               plan.ended        the batch is in progress, no ticket was sent
               quote.planned     a window of a quote counts
    worker     unit.claimed      a unit is leased, its file isn't read
               lines.finished    the engine is done with lines, nothing is stored
               part.stored       a part's object is stored, it doesn't count
               sequences.stored  unfinished sequences are stored, their unit's row doesn't name them
               part.counted      a part counts, its lines are still in the buffer
               unit.written      a unit's last word is written, its lease isn't given back
               lease.due         the lease thread is about to renew
               worker.draining   a drain has begun
    finalizer  batch.sealed      the batch is sealed and its `fin_epoch` taken
               window.merged     a window's rows are in the streams
               part.voided       a damaged part doesn't count any more, others may not be found yet
               output.stored     a result object is complete
               batch.publishing  all is stored, nothing is published
               batch.published   the batch has ended, nobody was told
    reaper     reaper.ticked     a tick begins
    purge      purge.rows_wiped  content is gone from the rows, its objects are there
               purge.objects_gone its objects are gone, nothing says so
    courier    webhook.sent      a receiver has answered, or not, and nothing is written of it
    exporter   export.begun      an upload in a tenant's store is begun and noted
               export.copied     all results are over there, the manifest isn't
               export.completed  the manifest is there, its row doesn't know
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_SETTING, _LOG_SETTING = "BATCHSVC_FAILPOINTS", "BATCHSVC_FAILPOINTS_LOG"
_LOOK_S = 0.01
_FORM = re.compile(r"(?P<name>[a-z_]+(?:\.[a-z_]+)+)=(?P<action>[a-z]+)(?::(?P<value>[^@]+))?(?:@(?P<nth>[1-9]\d*))?")


class FailpointError(Exception):
    """A failpoint was armed with `raise`."""


@dataclass(slots=True)
class _Armed:
    act: Callable[[], None]
    nth: int | None
    passes: Iterator[int] = field(default_factory=lambda: itertools.count(1))


def reach(name: str) -> None:
    """Says that this point was reached; does what the environment asks for here, normally nothing."""
    if (armed := _armed.get(name)) is not None:
        count = next(armed.passes)  # atomic, also for threads
        if armed.nth in (None, count):
            _note(name, count)
            armed.act()


def parse(text: str) -> dict[str, _Armed]:
    """The armed points of a setting. Raises ValueError: a misspelt fault would test nothing."""
    armed = {}
    for item in filter(None, (piece.strip() for piece in text.split(";"))):
        form = _FORM.fullmatch(item)
        if form is None:
            raise ValueError(f"{_SETTING}: {item!r} isn't name=action[:value][@n].")
        name, action, value, nth = form.groups()
        armed[name] = _Armed(_action(name, action, value), int(nth) if nth else None)
    return armed


def arm(env: Mapping[str, str]) -> None:
    """Arm this process by these variables; what was armed before is forgotten."""
    global _armed, _log
    _armed = parse(env.get(_SETTING, ""))
    _log = Path(env[_LOG_SETTING]) if env.get(_LOG_SETTING) else None


def _action(name: str, action: str, value: str | None) -> Callable[[], None]:
    def fail() -> None:
        raise FailpointError(name)

    def wait() -> None:
        while not Path(value or "").exists():
            time.sleep(_LOOK_S)

    def hang() -> None:
        threading.Event().wait()

    plain: dict[str, Callable[[], None]] = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "raise": fail,
        "hang": hang,
    }
    with_value: dict[str, Callable[[], None]] = {"sleep": lambda: time.sleep(float(value or 0)), "wait": wait}
    if action in plain and value is None:
        return plain[action]
    if action in with_value and value is not None and (action != "sleep" or _is_number(value)):
        return with_value[action]
    raise ValueError(f"{_SETTING}: {name} can't {action}{':' + value if value else ''}.")


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _note(name: str, count: int) -> None:
    if _log is not None:
        with _log.open("a", encoding="utf-8") as log:
            log.write(f"{os.getpid()} {name} {count}\n")


_armed: dict[str, _Armed] = {}
_log: Path | None = None
arm(os.environ)
