"""A dispatcher for programs without workers: what it is told goes nowhere, and the reaper finds the work."""

from __future__ import annotations


class NullDispatcher:
    """Sends nothing."""

    def plan(self, batch_id: str) -> None:
        pass

    def finalize(self, batch_id: str) -> None:
        pass

    def quote(self, quote_id: str) -> None:
        pass

    def ticket(self, digest: str, count: int = 1) -> None:
        pass

    def waiting(self, queue_name: str) -> int | None:
        return None

    def close(self) -> None:
        pass
