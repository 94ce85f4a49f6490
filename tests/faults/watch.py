"""A client that polls a batch while faults go on, and keeps every answer: what it saw must never go backwards (I14)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx

_POLL_S = 0.2
_ENDED_POLL_S = 2.0  # many that ended would keep the API busy
_TERMINAL = {"completed", "failed", "expired", "cancelled"}
_ORDER = ("validating", "in_progress", "cancelling", "finalizing")


class Watch:
    """Polls until it is stopped. An API that doesn't answer is no answer."""

    def __init__(self, url: Callable[[], str], key: str, batch_id: str) -> None:
        self.seen: list[dict[str, Any]] = []
        self._url, self._key, self._batch_id = url, key, batch_id
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"watch {batch_id}")
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def check(self, *, counts_may_fall: bool = False) -> None:
        """Counts only grow, a status never goes back, and what has ended is shown the same for ever."""
        for before, after in zip(self.seen, self.seen[1:], strict=False):
            if before["status"] in _TERMINAL:
                assert after == before, f"an ended batch changed: {before} became {after}"
                continue
            assert _rank(after["status"]) >= _rank(before["status"]), f"{before['status']} became {after['status']}"
            for name, count in before["request_counts"].items():
                assert counts_may_fall or after["request_counts"][name] >= count, (
                    f"{name} went from {count} to {after['request_counts']}"
                )
            assert _share(after) >= _share(before), f"progress went from {_share(before)} to {_share(after)}"
            if after["status"] not in _TERMINAL:
                assert _share(after) < 1, "all is done, but there is no file yet"

    @property
    def _has_ended(self) -> bool:
        return bool(self.seen) and self.seen[-1]["status"] in _TERMINAL

    def _run(self) -> None:
        with httpx.Client(timeout=30, trust_env=False, headers={"Authorization": f"Bearer {self._key}"}) as client:
            while not self._stopped.wait(_ENDED_POLL_S if self._has_ended else _POLL_S):
                try:
                    answer = client.get(f"{self._url()}/v1/batches/{self._batch_id}")
                except httpx.HTTPError:
                    continue
                if answer.status_code == 200:
                    self.seen.append(answer.json())


def _rank(status: str) -> int:
    return _ORDER.index(status) if status in _ORDER else len(_ORDER)


def _share(shown: dict[str, Any]) -> float:
    progress = shown.get("progress") or {}
    share = progress.get("share") if isinstance(progress, dict) else progress
    return float(share or 0)
