"""The formats of a model or a batch and the verdict on their quality, in a few words; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WORDS = {
    "unquantized": "not quantized",
    "within": "within the limits of quality",
    "unmeasured": "of unmeasured quality",
    "over": "over the limits of quality, forced",
}


def verdict(row: Mapping[str, Any]) -> str:
    """The verdict alone; empty where no worker has told any."""
    return str((row.get("quality") or {}).get("verdict", ""))


def told(row: Mapping[str, Any]) -> str:
    """Formats with their mean KL, and the verdict; empty where no worker has told any."""
    quality = row.get("quality")
    if not quality:
        return ""
    parts = f"{_part(quality['weights'])}, KV {_part(quality['kv'])}"
    return f"{parts}: {_WORDS.get(quality['verdict'], quality['verdict'])}"


def _part(part: Mapping[str, Any]) -> str:
    return str(part["format"]) if part["kl"] is None else f"{part['format']} (mean KL {part['kl']:.4f})"
