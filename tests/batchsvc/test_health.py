"""Health: parts are asked at the same time, a silent one is waited for only so long, and asked again only once it
spoke."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from batchsvc import health
from batchsvc.db.session import Database
from batchsvc.errors import UnavailableError
from batchsvc.health import Checks, Health
from batchsvc.metrics import ProcessMetrics
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from batchsvc.tables import metadata

sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


class Store:
    """Stands for an object store that may be silent, refuse, or forget."""

    def __init__(self) -> None:
        self.gate, self.puts = threading.Event(), 0
        self.error: Exception | None = None
        self.forgets = False
        self.gate.set()

    def put(self, _key: str, _data: bytes) -> None:
        self.puts += 1
        self.gate.wait(60)
        if self.error is not None:
            raise self.error

    def head(self, _key: str) -> object | None:
        return None if self.forgets else object()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def checks(settings: Settings, store: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    monkeypatch.setattr(health, "PATIENCE_S", 2.0)
    db = Database(settings.database_url)
    metadata.create_all(db.engine)
    made = Checks(db, lambda: store, settings.redis_url, {"engine": lambda: "ok"})
    yield made
    store.gate.set()
    made.close()
    db.dispose()


@sqlite
def test_a_silent_part_is_named_and_not_asked_twice(checks: Checks, store: Store) -> None:
    monitor = ProcessMetrics(checks)
    assert checks.look().is_ready
    store.gate.clear()
    for _ in range(2):
        found = checks.look()
        assert found.parts["store"] == "The object store hasn't answered for 2 s." and not found.is_ready
        assert {part for part, says in found.parts.items() if says == "ok"} == {"database", "redis", "engine"}
    assert b'batchsvc_part_up{part="store"} 0.0' in monitor.text()
    assert store.puts == 2, "one that answered, and one that hangs"
    store.gate.set()
    while not checks.look().is_ready:
        pass
    assert b"batchsvc_ready 1.0" in monitor.text()


@sqlite
def test_a_part_that_refuses_forgets_or_fails_is_named(checks: Checks, store: Store) -> None:
    store.error = UnavailableError("The object store doesn't answer.")
    assert checks.look().parts["store"] == "The object store doesn't answer."
    store.error = RuntimeError("postgresql://user:secret@host")
    assert checks.look().parts["store"] == "The object store can't be asked (RuntimeError)."
    store.error, store.forgets = None, True
    assert "lost" in checks.look().parts["store"]


@sqlite
def test_redis_that_hangs_is_asked_once(settings: Settings, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One try, which ends well before a probe of this process gives up: nobody waits for more here."""
    monkeypatch.setattr(health, "_REDIS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(health, "PATIENCE_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(0)
        checks = Checks(
            Database(settings.database_url), lambda: store, f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        )
        assert checks.look().parts["redis"].startswith("Redis doesn't answer (TimeoutError)")
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # nobody came a second time
            silent.accept()
        checks.close()


@sqlite
def test_the_store_is_made_when_it_is_first_needed(settings: Settings) -> None:
    db, made = Database(settings.database_url), []

    def make() -> ObjectStore:
        made.append(ObjectStore(settings))
        return made[0]

    checks = Checks(db, make, settings.redis_url)
    assert not made
    made_store = checks.look()
    assert len(made) == 1 and "store" in made_store.parts
    checks.close()
    db.dispose()


def test_only_redis_may_be_away() -> None:
    fine = {"database": "ok", "store": "ok", "redis": "ok", "control": "ok"}
    assert Health(fine).status == "ready"
    assert Health({**fine, "redis": "away"}).status == "degraded" and Health({**fine, "redis": "away"}).is_ready
    for part in ("database", "store", "control"):
        assert Health({**fine, part: "away"}).status == "unready"
        assert Health({**fine, part: "It is away."}).shown()["error"]["message"] == "It is away."
