"""Whether the parts that this process needs answer now: what /readyz says, part by part."""

from __future__ import annotations

from dataclasses import dataclass

import redis
from sqlalchemy.exc import SQLAlchemyError

from batchsvc.batches import queries
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore

OK = "ok"
_REDIS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Health:
    """`parts` holds "ok" or one sentence for each part. Without Redis all goes on, only later: it is degraded."""

    parts: dict[str, str]

    @property
    def status(self) -> str:
        if self.parts["database"] != OK or self.parts["store"] != OK:
            return "unready"
        return "ready" if self.parts["redis"] == OK else "degraded"


class Checks:
    """Probes of database, store and Redis. Each does what the service does: it writes."""

    def __init__(self, db: Database, store: ObjectStore, redis_url: str) -> None:
        self._db, self._store = db, store
        self._redis = redis.Redis.from_url(
            redis_url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
        )

    def look(self) -> Health:
        """Probe all parts, one after the other."""
        return Health({"database": self._database(), "store": self._object_store(), "redis": self._queue()})

    def close(self) -> None:
        self._redis.close()

    def _database(self) -> str:
        try:
            with self._db.transaction() as session:
                queries.probe_write(session)
        except SQLAlchemyError as error:
            return f"The database can't be written ({type(error).__name__})."
        return OK

    def _object_store(self) -> str:
        try:
            self._store.put(keys.PROBE, b"ready")
            if self._store.head(keys.PROBE) is None:
                return "The object store has lost what was just written."
        except ServiceError as error:
            return error.message
        return OK

    def _queue(self) -> str:
        try:
            self._redis.ping()
        except redis.RedisError as error:
            return f"Redis doesn't answer ({type(error).__name__}); work goes on, and starts later."
        return OK
