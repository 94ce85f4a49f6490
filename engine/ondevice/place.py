"""Where checks run: on a GPU at full size, else in Triton's interpreter at toy size; and how long something takes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TOY_NOTE = "TOY: there is no GPU here, so this ran on the CPU in Triton's interpreter: it shows that it runs, no speed."
_RECORDS_S = 0.02
"""What takes longer is timed as it is launched; shorter work would wait for the host between two launches."""


@dataclass(frozen=True, slots=True)
class Place:
    """`dtype` is that of activations and unquantized weights: the interpreter can't multiply bf16."""

    device: torch.device
    is_toy: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.is_toy else torch.bfloat16

    @property
    def name(self) -> str:
        return "the CPU" if self.is_toy else torch.cuda.get_device_name(self.device)

    def wait(self) -> None:
        """Until all that was launched has run."""
        if not self.is_toy:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], Any], times: int = 20) -> float:
        """One call of it, the mean of `times` behind each other, after one that doesn't count: launched at once, as a
        step's kernels are, where they can be recorded."""
        action()
        self.wait()
        start = time.perf_counter()
        action()
        self.wait()
        once_s = time.perf_counter() - start
        if self.is_toy:
            return once_s
        graph = self._recorded(action, times) if once_s < _RECORDS_S else None

        def launch() -> None:
            if graph is not None:
                graph.replay()
                return
            for _ in range(times):
                action()

        launch()
        event: Any = torch.cuda.Event  # without types
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        self.wait()
        return float(begin.elapsed_time(end)) / 1e3 / times

    def _recorded(self, action: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        with contextlib.suppress(RuntimeError), torch.cuda.graph(graph):
            for _ in range(times):
                action()
            return graph
        return None


def arguments(description: str) -> argparse.Namespace:
    """--toy is set by itself where there is no GPU."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--toy", action="store_true", help="on the CPU, in the interpreter (default without a GPU)")
    parser.add_argument("--limit-s", type=float, help="begin nothing new after so many seconds, end what then runs")
    parser.add_argument("--json", type=Path, help="a file that all figures are written to, again after each")
    found = parser.parse_args()
    found.toy = found.toy or not torch.cuda.is_available()
    if found.toy:
        say(TOY_NOTE)
    return found


def place_of(is_toy: bool) -> Place:
    return Place(torch.device("cpu" if is_toy else "cuda"), is_toy)


def say(sentence: str) -> None:
    print(sentence, file=sys.stdout, flush=True)


def keep(path: Path | None, figures: dict[str, Any]) -> None:
    """Writes them to the file that was asked for."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
