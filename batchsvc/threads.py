"""Threads whose end is noticed: an exception in one goes to whoever must act, or is logged and the work begins anew."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from batchsvc import logs

log = structlog.get_logger(__name__)


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


class LastingThread(WorkThread):
    """Takes one `turn` after the other until `stop`. One that ends by an exception is logged as NAME.crashed, and the
    next follows. A turn that waits is to wait for `stopped`, too."""

    def __init__(self, name: str, turn: Callable[[], None]) -> None:
        super().__init__(name, turn, lambda error: log.error(f"{name}.crashed", **logs.where(error)))
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Have it end after this turn, and wait for that."""
        self.stopped.set()
        self.join()

    def _guarded(self) -> None:
        while not self.stopped.is_set():
            super()._guarded()


class WokenThread(LastingThread):
    """Does `work` once after each `wake`, however often it is woken while it works."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name, self._turn)
        self._work = work
        self._is_awake = threading.Event()

    def wake(self) -> None:
        """Have it look for work. Returns at once."""
        self._is_awake.set()

    def stop(self) -> None:
        self.stopped.set()
        self.wake()
        super().stop()

    def _turn(self) -> None:
        self._is_awake.wait()
        self._is_awake.clear()
        if not self.stopped.is_set():
            self._work()
