"""Reads the text sides of models before their first call, which would wait for it: weights have to be hashed for that.

A thread looks every few seconds for models that it doesn't know yet, and reads those that workers serve, then the
newest, as many as a process keeps. What can't be read here it leaves to the calls, which say why. Nothing waits for it.
"""

from __future__ import annotations

import threading

import structlog
from sqlalchemy.exc import SQLAlchemyError

from batchsvc.batches import models
from batchsvc.batches.texts_here import MOST_TEXTS, NotHereError, text_here
from batchsvc.db.session import Database
from engine.errors import ModelError

_EVERY_S = 5.0
_END_S = 2.0  # how long an end waits for what is being read

log = structlog.get_logger(__name__)


class TextsAhead:
    """The thread of one API process."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._tried: set[tuple[str, str]] = set()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="texts-ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def look(self) -> None:
        """Read what is new."""
        try:
            with self._db.reading() as session:
                found = models.likely(session, MOST_TEXTS)
        except SQLAlchemyError as error:  # it may answer the next time
            log.debug("texts.unknown", error=type(error).__name__)
            return
        for path, digest in found:
            if (path, digest) in self._tried or self._ended.is_set():
                continue
            self._tried.add((path, digest))
            try:
                text_here(path, digest)
            except (NotHereError, ModelError, OSError) as error:
                log.debug("text.not_here", error=type(error).__name__)

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.look()
            except Exception as error:  # what it does is never needed
                log.warning("texts.failed", error=type(error).__name__)
            self._ended.wait(_EVERY_S)
