"""Threads of a control process that send things out: a tick wakes one, which hands what is due to a few senders.

Nothing here delays a repair, and a sender has one thing at a time: a slow receiver delays nobody else. What a process
held when it died comes back by its lease.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import structlog
from sqlalchemy.exc import DBAPIError

from batchsvc import logs
from batchsvc.errors import ServiceError
from batchsvc.threads import WokenThread

C = TypeVar("C")

log = structlog.get_logger(__name__)


class Senders(ABC, Generic[C]):
    """The senders of one kind, `most` at once. `wake` is for every tick, `send_due` does all of it here and now."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._thread = WokenThread(name, self._hand_out)
        self._stopped = self._thread.stopped
        self._free = threading.Semaphore(most)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=name)

    @abstractmethod
    def _look(self) -> int:
        """See what is new. Returns how much somebody should send now."""

    @abstractmethod
    def _claim(self) -> C | None:
        """The right to send what has been due for longest; None: nothing is."""

    @abstractmethod
    def _serve(self, claimed: C) -> int:
        """Use it. Returns how many attempts were made."""

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look for what is due. Returns at once."""
        self._thread.wake()

    def stop(self) -> None:
        """End when what is on its way has."""
        self._thread.stop()
        self._pool.shutdown()

    def send_due(self) -> int:
        """Send all that is due, one after the other. Returns how many attempts that were."""
        made = 0
        self._look()
        while (claimed := self._claim()) is not None:
            made += self._serve(claimed)
        return made

    def _hand_out(self) -> None:
        try:
            due = self._look()
        except (ServiceError, DBAPIError, OSError) as error:
            log.warning(f"{self._name}.failed", **logs.where(error))
            return
        for _ in range(min(due, self._most)):
            if not self._free.acquire(blocking=False):
                break
            self._pool.submit(self._send)

    def _send(self) -> None:
        """Serve one claim after the other until nothing is due."""
        try:
            while not self._stopped.is_set() and (claimed := self._claim()) is not None:
                self._serve(claimed)
        except Exception as error:  # what it held comes back by its lease
            log.warning(f"{self._name}.failed", **logs.where(error))
        finally:
            self._free.release()
