"""Typed look-ups in what a model's files say, whose errors name the file and the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError

MOST = (1 << 31) - 1
_MOST_SHOWN = 80  # characters of a value


class Fields:
    """The values of a config.json or of GGUF metadata, none of them believed before it is checked."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def count(self, key: str, *, default: int | None = None, most: int = MOST) -> int:
        """A whole number from 1 to `most`."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self._unusable(key, value)
        return value

    def number(self, key: str, *, default: float) -> float:
        """A finite number above 0."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST * MOST:
            raise self._unusable(key, value)
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._unusable(key, value)
        return value

    def text(self, key: str, *, default: str) -> str:
        """A text."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self._unusable(key, value)
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of texts, or nothing."""
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(text, str) for text in value)):
            raise self._unusable(key, value)
        return value

    def nested(self, key: str) -> dict[str, Any] | None:
        """Fields inside a field, or nothing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._unusable(key, value)
        return value

    def _unusable(self, key: str, value: object) -> ModelError:
        found = "a number that isn't finite" if isinstance(value, float) and not math.isfinite(value) else repr(value)
        shown = found if len(found) <= _MOST_SHOWN else f"{found[:_MOST_SHOWN]}..."
        return ModelError(f"{self.path} doesn't give a usable {key} (found {' '.join(shown.split())}).")
