"""Whether the parts that a process needs answer now: what /readyz says, part by part, and /metrics as a gauge.

Each part is asked on a thread of its own, and nobody waits for one longer than `PATIENCE_S`: what hangs is as bad as
what refuses. A part that still hangs from the last time isn't asked once more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from batchsvc.batches import queries
from batchsvc.db.session import Database
from batchsvc.errors import ServiceError, UnavailableError
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore

OK = "ok"
PATIENCE_S = 5.0
_REDIS_TIMEOUT_S = 2.0
_NAMES = {"database": "The database", "store": "The object store", "redis": "Redis"}


@dataclass(frozen=True, slots=True)
class Health:
    """`parts` holds "ok" or one sentence for each part. Without Redis all goes on, only later: it is degraded."""

    parts: dict[str, str]

    @property
    def status(self) -> str:
        if any(says != OK for name, says in self.parts.items() if name != "redis"):
            return "unready"
        return "ready" if self.parts.get("redis", OK) == OK else "degraded"

    @property
    def is_ready(self) -> bool:
        return self.status != "unready"

    def shown(self) -> dict[str, Any]:
        """As /readyz says it; an error's envelope comes with it where the process isn't ready."""
        said: dict[str, Any] = {"status": self.status, "parts": self.parts}
        if not self.is_ready:
            broken = " ".join(text for text in self.parts.values() if text != OK)
            said |= UnavailableError(broken, code="not_ready").envelope()
        return said


class Checks:
    """Probes of database, store and Redis, each of which does what the service does: it writes. `store` is called when
    it is first needed, for a client of it takes a while to make; `own` adds parts of this process, which answer at
    once. Thread-safe."""

    def __init__(
        self,
        db: Database,
        store: Callable[[], ObjectStore],
        redis_url: str,
        own: Mapping[str, Callable[[], str]] | None = None,
    ) -> None:
        self._db, self._store = db, store
        self._redis = redis.Redis.from_url(
            redis_url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S
        )
        self._own = dict(own or {})
        self._is_database_away = False
        self._probes = {
            "database": _Probe("database", self._database),
            "store": _Probe("store", self._object_store),
            "redis": _Probe("redis", self._queue),
        }

    def look(self) -> Health:
        """Probe all parts at once; takes `PATIENCE_S` at most."""
        until_s = time.monotonic() + PATIENCE_S
        asked = {name: probe.begin() for name, probe in self._probes.items()}
        parts = {name: answer.wait(until_s) for name, answer in asked.items()}
        self._is_database_away = parts["database"] != OK
        return Health({**parts, **{name: ask() for name, ask in self._own.items()}})

    def was_database_away(self) -> bool:
        """Whether the database didn't answer at the last look; waits for nothing."""
        return self._is_database_away

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
            store = self._store()
            store.put(keys.PROBE, b"ready")
            if store.head(keys.PROBE) is None:
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


class HealthMetrics(Collector):
    """What was found, as a gauge for each part, and for whether the process is ready."""

    def __init__(self, health: Health) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        health = self._health
        up = GaugeMetricFamily(
            "batchsvc_part_up", "Whether a part that this process needs answers: 1 or 0.", labels=("part",)
        )
        for name, says in health.parts.items():
            up.add_metric([name], says == OK)
        yield up
        yield GaugeMetricFamily("batchsvc_ready", "Whether this process can do its work: 1 or 0.", health.is_ready)


class _Answer:
    """What a probe says, once it does."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._ended = threading.Event()
        self._says = ""

    @property
    def is_there(self) -> bool:
        return self._ended.is_set()

    def say(self, sentence: str) -> None:
        self._says = sentence
        self._ended.set()

    def wait(self, until_s: float) -> str:
        """The sentence; one of its own if there is none by then, in monotonic time."""
        if self._ended.wait(max(0.0, until_s - time.monotonic())):
            return self._says
        return f"{_NAMES[self._part]} hasn't answered for {PATIENCE_S:g} s."


class _Probe:
    """Asks one part, once at a time."""

    def __init__(self, part: str, ask: Callable[[], str]) -> None:
        self._part = part
        self._ask = ask
        self._lock = threading.Lock()
        self._answer: _Answer | None = None

    def begin(self) -> _Answer:
        with self._lock:
            if self._answer is None or self._answer.is_there:
                self._answer = _Answer(self._part)
                # a daemon: a part that hangs must not keep the process from ending
                name = f"probe-{self._part}"
                threading.Thread(target=self._run, args=(self._answer,), name=name, daemon=True).start()
            return self._answer

    def _run(self, answer: _Answer) -> None:
        try:
            answer.say(self._ask())
        except Exception as error:  # a defect of ours; whoever waits is told that all isn't well
            answer.say(f"{_NAMES[self._part]} can't be asked ({type(error).__name__}).")
