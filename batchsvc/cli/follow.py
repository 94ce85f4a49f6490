"""Watches a batch until it ends: a live bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from batchsvc.cli.console import Console
from batchsvc.clock import now_ms
from batchsvc.money import format_dollars

if TYPE_CHECKING:
    from batchsvc.cli.client import Client

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_POLL_S = 0.4
_PLAIN_EVERY_S = 5.0
_PLAIN_AT_LEAST_S = 30.0


class Left(NamedTuple):
    """Seconds until a batch has ended, at best and at worst."""

    least_s: float
    most_s: float

    def __str__(self) -> str:
        least, most = clock(self.least_s), clock(self.most_s)
        return most if least == most else f"{least} to {most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one look at a batch says. The rate counts from the first look at which the batch was running; `share` of
    the work and the seconds `left`, at best and at worst, are the service's."""

    status: str
    share: float | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_nanos: int
    tokens_per_s: float
    left: Left | None
    waiting_for: str | None
    is_at_risk: bool

    @property
    def done(self) -> int:
        return self.completed + self.failed

    def numbers(self) -> str:
        """The figures in words, the same on a terminal and in a log."""
        if self.waiting_for and not self.done:
            return f"waiting for: {self.waiting_for}"
        if not self.total:
            return ""
        share = f"{100 * self.cached_tokens // self.input_tokens} % cached" if self.input_tokens else "0 % cached"
        says = [] if self.share is None else [f"{math.floor(100 * self.share)} %"]
        says += [
            f"{self.done:,} of {self.total:,} lines",
            f"{self.failed:,} failed",
            f"{self.tokens_per_s:,.0f} tokens/s",
        ]
        says += [share, format_dollars(self.cost_nanos)]
        if self.left is not None:
            says.append(f"{self.left} left")
        if self.is_at_risk:
            says.append("the deadline is at risk")
        if self.waiting_for:
            says.append(f"waiting for: {self.waiting_for}")
        return ", ".join(says)


class Meter:
    """Turns successive batch objects into Progress."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = lambda: now_ms() / 1000
    ) -> None:
        self._now = now
        self._wall = wall
        self._start: float | None = None
        self._start_tokens = 0

    def look(self, batch: dict[str, Any]) -> Progress:
        counts, usage = batch.get("request_counts") or {}, batch.get("usage") or {}
        tokens = usage.get("total_tokens", 0)
        if self._start is None and batch["status"] != "validating":
            self._start, self._start_tokens = self._now(), tokens
        elapsed = self._now() - self._start if self._start is not None else 0.0
        new_tokens = tokens - self._start_tokens
        return Progress(
            status=batch["status"],
            share=(batch.get("progress") or {}).get("share"),
            total=counts.get("total", 0),
            completed=counts.get("completed", 0),
            failed=counts.get("failed", 0),
            input_tokens=usage.get("input_tokens", 0),
            cached_tokens=(usage.get("input_tokens_details") or {}).get("cached_tokens", 0),
            output_tokens=usage.get("output_tokens", 0),
            cost_nanos=usage.get("cost_nanos", 0),
            tokens_per_s=new_tokens / elapsed if elapsed > 0 else 0.0,
            left=self._left(batch.get("estimated_completion_at")),
            waiting_for=batch.get("waiting_for"),
            is_at_risk=bool(batch.get("at_risk")),
        )

    def _left(self, ends: dict[str, int] | None) -> Left | None:
        if ends is None:
            return None
        return Left(*(max(0.0, ends[end] - self._wall()) for end in ("low", "high")))


class View(Protocol):
    """Shows progress; `show` may be called as often as one likes."""

    def show(self, progress: Progress) -> None: ...


def follow(
    client: Client, batch: dict[str, Any], console: Console, *, check: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Look at a batch until it has ended, and return it as it is then. `check` may raise to stop it."""
    meter = Meter()
    with _view(console) as view:
        while batch["status"] not in ENDED:
            check(batch)
            view.show(meter.look(batch))
            time.sleep(_POLL_S)
            batch = client.batch(batch["id"])
        view.show(meter.look(batch))
    return batch


def clock(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _view(console: Console) -> AbstractContextManager[View]:
    return _Bar() if console.is_live else nullcontext(_Lines(console))


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: tuple[str, int, str | None] | None = None
        self._told = 0.0

    def show(self, progress: Progress) -> None:
        seen = (progress.status, progress.done, progress.waiting_for)
        quiet_s = time.monotonic() - self._told
        is_news = self._last is None or seen[0] != self._last[0] or (seen != self._last and quiet_s > _PLAIN_EVERY_S)
        if is_news or quiet_s > _PLAIN_AT_LEAST_S:
            text = progress.numbers()
            self._console.say(f"{progress.status}: {text}" if text else progress.status)
            self._last, self._told = seen, time.monotonic()


class _Bar:
    def __init__(self) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),  # folds in a narrow window
            console=RichConsole(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, numbers="")

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, progress: Progress) -> None:
        self._bar.update(
            self._task,
            description=progress.status,
            total=None if progress.share is None else 1.0,
            completed=progress.share or 0.0,
            numbers=progress.numbers(),
        )
