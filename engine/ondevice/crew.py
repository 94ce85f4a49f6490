"""Runs steps in child processes (child.py), within a time: whatever one of them does, the others are still run.

A child that ended or was too slow is replaced for the steps behind. Several lanes of children run side by side where
steps are checks: most of their time is compiling, and what one compiled the others find on the disk.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import IO, Any

from engine.ondevice.child import MARK, Step

START_S = 120.0
"""Longest that a child may take until it is ready."""
_ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Says what still fits into the time."""

    def __init__(self, limit_s: float | None) -> None:
        self._began_s = time.monotonic()
        self._limit_s = float("inf") if limit_s is None else limit_s

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        return self._limit_s - self.spent_s

    def has(self, seconds: float) -> bool:
        return self.left_s > seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step: `figures`, or why there are none. `is_late`: it wasn't begun, as the time was up."""

    index: int
    step: Step
    figures: dict[str, Any] | None
    error: str | None = None
    is_late: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Crew:
    """`maker` is the MODULE:FUNCTION that made `steps`."""

    maker: str
    steps: Sequence[Step]
    is_toy: bool
    clock: Clock

    def run(self, indices: Sequence[int], lanes: int = 1) -> Iterator[Outcome]:
        """Outcomes as they come: in order, where there is one lane."""
        lanes = max(1, min(lanes, len(indices)))
        outcomes: queue.Queue[Outcome] = queue.Queue()
        threads = [
            threading.Thread(target=self._run_lane, args=(indices[lane::lanes], outcomes), daemon=True)
            for lane in range(lanes)
        ]
        for thread in threads:
            thread.start()
        for _ in indices:
            yield outcomes.get()
        for thread in threads:
            thread.join()

    def _run_lane(self, indices: Sequence[int], outcomes: queue.Queue[Outcome]) -> None:
        child: _Child | None = None
        for index in indices:
            step, start_s = self.steps[index], time.monotonic()
            if not self.clock.has(step.expected_s):
                outcomes.put(Outcome(index, step, None, "the time is up", is_late=True))
                continue
            figures, error = None, None
            try:
                if child is not None and not child.is_there:  # it ended behind its last step
                    child.end()
                    child = None
                if child is None:
                    child = _Child(self.maker, self.is_toy, min(START_S, self.clock.left_s))
                figures = child.ask(index, min(step.limit_s, self.clock.left_s))
            except _StepError as failure:
                error = str(failure)
            except _ChildError as failure:
                error, child = str(failure), None
            outcomes.put(Outcome(index, step, figures, error, seconds=time.monotonic() - start_s))
        if child is not None:
            child.end()


class _StepError(Exception):
    """The step says so itself; its process goes on."""


class _ChildError(Exception):
    """The process is gone."""


class _Child:
    def __init__(self, maker: str, is_toy: bool, limit_s: float) -> None:
        command = [sys.executable, "-m", "engine.ondevice.child", maker, *(["--toy"] if is_toy else [])]
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the child is gone)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=_ROOT
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._next(limit_s)

    def ask(self, index: int, limit_s: float) -> dict[str, Any]:
        """The figures of a step. Raises _StepError or _ChildError."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(f"{index}\n")
            self._process.stdin.flush()
        except OSError:
            raise _ChildError(self._last_words()) from None
        told = self._next(limit_s)
        if "error" in told:
            if not told["ends"]:
                raise _StepError(told["error"])
            self.end()
            raise _ChildError(told["error"])
        figures: dict[str, Any] = told["figures"]
        return figures

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def end(self, patience_s: float = 10.0) -> None:
        """Lets it go; ends it, if it doesn't."""
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(patience_s)  # a compiler that it started may still hold its pipe
        self._errors.close()

    def _next(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(limit_s, 0.0))
        except queue.Empty:
            self.end(0.0)
            raise _ChildError(f"ended after {limit_s:.0f} s, as it took too long") from None
        if line is None:
            raise _ChildError(self._last_words())
        found: dict[str, Any] = loads(line)
        return found

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(MARK):
                    self._lines.put(line.removeprefix(MARK))
        self._lines.put(None)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        self.end()
        return f"its process ended with code {code}" + (f": {said[-1][:200]}" if said else "")
