"""What a worker process tells of itself over HTTP: it is open before the work begins, and says what it waits for.

/readyz    database, store and Redis as everywhere, and a part of its own (`control` or `engine`)
/metrics   its parts, its counters, its process, and of an engine worker what its engine does, now rather than as of
           the last heartbeat
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from batchsvc import engine_metrics
from batchsvc.accounts import service as accounts
from batchsvc.accounts.scrapers import Scrapers
from batchsvc.accounts.service import Caller
from batchsvc.batches import queries
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError
from batchsvc.health import OK, Checks
from batchsvc.listener import Listener
from batchsvc.metrics import ProcessMetrics
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore

_STARTING = "The process is starting: an engine worker loads its model, which can take minutes."


class Signals(Collector):
    """The listener of one worker process, and what it asks. Its database connections are its own."""

    def __init__(self, settings: Settings, role: str) -> None:
        """Raises UnavailableError, which names the setting, if it can't listen where it should."""
        self._db = Database(settings.database_url, pool_size=2)
        self._trouble: Callable[[], str | None] = lambda: _STARTING
        self._shown: Callable[[], Mapping[str, Any]] | None = None
        self._digest = ""
        self._name = ""
        store = lru_cache(maxsize=1)(lambda: ObjectStore(settings))
        self._checks = Checks(self._db, store, settings.redis_url, {role: lambda: self._trouble() or OK})
        self._scrapers = Scrapers(self._checks.was_database_away)
        metrics = ProcessMetrics(self._checks)
        metrics.registry.register(self)
        self._listener = Listener(
            settings.signals_host,
            settings.signals_port,
            checks=self._checks,
            metrics=metrics.text,
            may_read=self._may_read,
        )

    @classmethod
    @contextmanager
    def opened(cls, settings: Settings, role: str) -> Iterator[Signals]:
        """Open while the block runs."""
        signals = cls(settings, role)
        signals._listener.start()
        try:
            yield signals
        finally:
            signals._close()

    def watch(
        self,
        trouble: Callable[[], str | None],
        shown: Callable[[], Mapping[str, Any]] | None = None,
        digest: str = "",
    ) -> None:
        """Ask this from now on: why the process doesn't do its work, and what its engine says of itself, of the model
        of `digest`. Both are called on the listener's threads and must not wait."""
        self._digest, self._shown, self._trouble = digest, shown, trouble
        self._model()  # while the database certainly answers

    def describe(self) -> list[Metric]:
        """Nothing, so that registering asks nobody."""
        return []

    def collect(self) -> Iterator[Metric]:
        if self._shown is not None:
            yield from engine_metrics.of_worker(self._shown(), (self._model(), self._digest))

    def _model(self) -> str:
        """The label of the model; none while the database doesn't answer."""
        if not self._name:
            try:
                with self._db.reading() as session:
                    self._name = queries.labels_by_digest(session).get(self._digest, "")
            except SQLAlchemyError:
                return ""
        return self._name

    def _may_read(self, secret: str) -> bool:
        try:
            self._scrapers.admit(secret, lambda: self._caller(secret))
        except (ServiceError, SQLAlchemyError):
            return False
        return True

    def _caller(self, secret: str) -> Caller:
        with self._db.reading() as session:
            return accounts.caller(session, secret)

    def _close(self) -> None:
        self._listener.close()
        self._checks.close()
        self._db.dispose()
