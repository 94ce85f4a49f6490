"""Finds stop strings in growing text, however the text is cut into pieces.

The first stop string that is complete ends the answer; of two that complete at the same character the longer one
counts. So the result depends on the text alone, not on where tokens end.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may be the beginning of a stop string. `found` is the one that ended the answer, if any."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.found is not None

    def push(self, piece: str) -> str:
        """The text that is certainly part of the answer; the stop string and what follows it never are."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.found = min(found)
            self._held = ""
            return text[:start]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
