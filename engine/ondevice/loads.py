"""What whole engines are given to do, and the time that is left for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8", "bf16"), "int4": ("w4a16", "bf16"), "int8 KV": ("bf16", "int8")}
"""Of weights and of KV, by the name that a table has for both."""


@dataclass(frozen=True, slots=True)
class Load:
    """`count` sequences at once; the first `shared` tokens of each prompt are the same."""

    prompt: int
    output: int
    count: int
    shared: int = 0

    @property
    def name(self) -> str:
        lead = f"{self.shared} shared + " if self.shared else ""
        return f"{lead}{self.prompt - self.shared} in / {self.output} out, {self.count} sequences"

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return self.count * self.output


LOADS = (Load(128, 1024, 512), Load(1024, 128, 512), Load(2112, 128, 512, shared=2048))
FEW = Load(128, 128, 64)
"""For the comparison with transformers."""
TOY_LOADS = (Load(6, 2, 2), Load(12, 2, 1), Load(36, 2, 2, shared=32))
TOY_FEW = Load(6, 2, 2)


class Clock:
    """Says what still fits into the time."""

    def __init__(self, limit_s: float | None) -> None:
        self._end_s = None if limit_s is None else time.monotonic() + limit_s

    def has(self, seconds: float) -> bool:
        return self._end_s is None or time.monotonic() + seconds < self._end_s
