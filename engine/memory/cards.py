"""The accelerators that a plan may name: memory, bandwidth, and what an hour costs unless one says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from engine.errors import ConfigError

GB = 10**9
_MOST_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """`price_nanos` an hour: a round number to reckon with until one says, nobody's offer; None if there is none."""

    name: str
    memory_bytes: int
    read_bytes_per_s: int
    price_nanos: int | None

    def __str__(self) -> str:
        return f"{self.name} ({self.memory_bytes / GB:g} GB)"


def _card(name: str, gb: int, gb_per_s: int, dollars: str) -> Card:
    nanos = int(Decimal(dollars) * 10**9)
    return Card(name=name, memory_bytes=gb * GB, read_bytes_per_s=gb_per_s * GB, price_nanos=nanos)


CARDS = {
    "t4": _card("T4", 16, 320, "0.35"),
    "l4": _card("L4", 24, 300, "0.70"),
    "a10g": _card("A10G", 24, 600, "1.00"),
    "rtx4090": _card("RTX 4090", 24, 1008, "0.50"),
    "l40s": _card("L40S", 48, 864, "1.20"),
    "a100-40": _card("A100", 40, 1555, "1.30"),
    "a100": _card("A100", 80, 2039, "1.80"),
    "h100": _card("H100", 80, 3350, "2.50"),
    "h200": _card("H200", 141, 4800, "3.50"),
    "b200": _card("B200", 180, 8000, "5.00"),
    "mi300x": _card("MI300X", 192, 5300, "2.50"),
}
"""Memory as it is sold, in GB of 1e9 bytes: what chips that count in GiB have above it is left to their drivers.
Bandwidths are those of the data sheets, of the SXM variant where there are several."""


def find_card(text: str) -> Card:
    """A card by name, or any other by its numbers as GB:GB/s, such as 48:864. Raises ConfigError."""
    spelled = text.strip().lower().replace(" ", "").removeprefix("nvidia").removeprefix("amd")
    if spelled in CARDS:
        return CARDS[spelled]
    number = rf"(\d{{1,{_MOST_DIGITS}}}(?:\.\d{{1,3}})?)"
    found = re.fullmatch(rf"{number}:{number}", spelled, re.ASCII)
    if found and Decimal(found[1]) > 0 and Decimal(found[2]) > 0:
        memory, bandwidth = (int(Decimal(size) * GB) for size in found.groups())
        return Card(name="card", memory_bytes=memory, read_bytes_per_s=bandwidth, price_nanos=None)
    raise ConfigError(
        f"There is no card {text[:40]!r}; there are {', '.join(CARDS)}, or any other as GB:GB/s, such as 48:864."
    )
