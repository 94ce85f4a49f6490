"""Where checks run: on a GPU at full size, else in Triton's interpreter at toy size; and how long something takes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TOY_NOTE = "TOY: there is no GPU here, so this ran on the CPU in Triton's interpreter: it shows that it runs, no speed."


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
        """One call of it, the mean of `times` behind each other, after one that doesn't count."""
        action()
        self.wait()
        if self.is_toy:
            start = time.perf_counter()
            action()
            return time.perf_counter() - start
        event: Any = torch.cuda.Event  # without types
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        for _ in range(times):
            action()
        end.record()
        self.wait()
        return float(begin.elapsed_time(end)) / 1e3 / times


def arguments(description: str) -> argparse.Namespace:
    """--toy, which is set by itself where there is no GPU. The interpreter has to be switched on before any kernel is
    imported, so that this comes first."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--toy", action="store_true", help="on the CPU, in the interpreter (default without a GPU)")
    parser.add_argument("--limit-s", type=float, help="begin nothing new after so many seconds")
    found = parser.parse_args()
    found.toy = found.toy or not torch.cuda.is_available()
    if found.toy:
        os.environ["TRITON_INTERPRET"] = "1"
        say(TOY_NOTE)
    return found


def place_of(is_toy: bool) -> Place:
    return Place(torch.device("cpu" if is_toy else "cuda"), is_toy)


def say(sentence: str) -> None:
    print(sentence, file=sys.stdout, flush=True)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns under their names."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    )
