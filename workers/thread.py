"""A thread whose end is noticed: an exception in it goes to whoever must act, never to nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable


class WorkThread:
    """Runs `run` until it returns. `on_crash` gets the exception that ended it, on the thread itself."""

    def __init__(self, name: str, run: Callable[[], None], on_crash: Callable[[Exception], None]) -> None:
        self._run = run
        self._on_crash = on_crash
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end; returns at once if it never started or if the thread itself asks."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._on_crash(error)
