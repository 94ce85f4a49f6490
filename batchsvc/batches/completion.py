"""Completion windows: how long a batch may take, and the price tier that goes with it. Pure.

OpenAI's 24h is always among them; a deployment adds others by the setting BATCHSVC_WINDOWS.
"""

from __future__ import annotations

from dataclasses import dataclass

_UNIT_MS = {"m": 60_000, "h": 3_600_000, "d": 86_400_000}
_ALWAYS = "24h"


@dataclass(frozen=True, slots=True)
class CompletionWindow:
    """One that batches may ask for by its name, such as "24h"."""

    name: str

    @property
    def length_ms(self) -> int:
        """From the creation of a batch to its deadline."""
        return int(self.name[:-1]) * _UNIT_MS[self.name[-1]]

    @property
    def tier(self) -> str:
        """The tier of the price book that it is paid by."""
        return f"batch_{self.name}"


def offered(setting: str) -> dict[str, CompletionWindow]:
    """What batches may ask for, by name; the setting's form has been checked."""
    return {name: CompletionWindow(name) for name in dict.fromkeys([_ALWAYS, *setting.split(",")])}
