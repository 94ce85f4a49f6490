"""Notes when keys were last used: in memory at each call, in the database once a minute for all of them together.

What a process noted in its last minute is lost if it is killed: the time is for whoever looks for keys that nobody
uses, and is true to about a minute.
"""

from __future__ import annotations

import threading

import structlog
from sqlalchemy.exc import SQLAlchemyError

from batchsvc.accounts import queries
from batchsvc.db.session import Database
from batchsvc.threads import LastingThread

_EVERY_S = 60.0

log = structlog.get_logger(__name__)


class LastUse:
    """The notes of one process, written by a thread that begins with the first of them."""

    def __init__(self, db: Database, *, every_s: float = _EVERY_S) -> None:
        self._db = db
        self._every_s = every_s
        self._used_ms: dict[str, int] = {}
        self._lock = threading.Lock()
        self._has_begun = False
        self._thread = LastingThread("last_use", self._turn)

    def note(self, key_id: str, now_ms: int) -> None:
        """A key was used."""
        with self._lock:
            self._used_ms[key_id] = now_ms
            if not self._has_begun:
                self._has_begun = True
                self._thread.start()

    def write(self) -> None:
        """Write what was noted since the last time. If the database doesn't answer, it is noted again."""
        with self._lock:
            used, self._used_ms = self._used_ms, {}
        if not used:
            return
        try:
            self._db.run(lambda session: queries.note_uses(session, used))
        except SQLAlchemyError as error:
            log.warning("keys.unwritten", error=type(error).__name__)
            with self._lock:
                self._used_ms = {**used, **self._used_ms}

    def close(self) -> None:
        """Write the last notes and end."""
        self._thread.stop()
        self.write()

    def _turn(self) -> None:
        if not self._thread.stopped.wait(self._every_s):
            self.write()
