"""What whole engines are given to do."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8", "bf16"), "int8 KV": ("bf16", "int8"), "int4": ("w4a16", "bf16")}
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

    def expected_s(self, *, plans: bool = True) -> float:
        """Seconds on a large device, for a model of eight billion weights. Not `plans`: nothing is shared."""
        shared = self.shared if plans else 0
        return (self.count * (self.prompt - shared) + shared) / 25_000 + self.tokens / 15_000


SHARED = Load(2112, 128, 512, shared=2048)
LOADS = (SHARED, Load(1024, 128, 128), Load(128, 1024, 512))
"""In this order: what takes longest may not fit into the time."""
FEW = Load(128, 128, 64)
"""For the comparison with transformers."""
TOY_SHARED = Load(36, 2, 2, shared=32)
TOY_LOADS = (TOY_SHARED, Load(12, 2, 1), Load(6, 2, 2))
TOY_FEW = Load(6, 2, 2)
