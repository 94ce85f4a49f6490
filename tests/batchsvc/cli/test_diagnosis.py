"""What `doctor` finds of a service: all well where it is, and for each thing that is wrong a way out."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text, update
from sqlalchemy.orm import Session

from batchsvc.audit.actor import at_command_line
from batchsvc.batches import incident_service, models, tally_queries, worker_queries
from batchsvc.batches.tables import Tally
from batchsvc.batches.worker_queries import Place
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction
from batchsvc.cli import diagnosis
from batchsvc.cli.diagnosis import Finding
from batchsvc.clock import now_ms
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore

DIGEST = "d" * 64


@pytest.fixture
def healthy(settings: Settings) -> Iterator[tuple[Settings, Database]]:
    """A service in which everything is as it should be."""
    migrate.upgrade(settings.database_url)
    ObjectStore(settings).ensure_bucket()
    database = Database(settings.database_url)
    database.run(_work)
    yield settings, database
    database.dispose()


def _work(session: Session) -> None:
    models.register(session, "tiny", str(Path(__file__)), digest=DIGEST, context_tokens=64)
    worker_queries.register(session, "h:1:a", DIGEST, Place(name="one", models=(DIGEST,)))
    worker_queries.beat(session, "h:1:a", DIGEST, is_draining=False, stats={"clock_ms": now_ms()})
    tally_queries.add(session, "reaper_ticks")


def findings(settings: Settings) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnosis.examine(settings)}


def test_a_service_that_is_well(healthy: tuple[Settings, Database]) -> None:
    found = findings(healthy[0])
    assert {name for name, one in found.items() if one.level == "fail"} == set(), found
    wrong = {name: one.says for name, one in found.items() if one.level == "warn" and name != "disk"}
    assert wrong == {}
    assert list(found) == ["database", "redis", "store", "disk", *diagnosis._QUESTIONS]
    with healthy[1].reading() as session:
        assert session.execute(text("SELECT count(*) FROM garbage")).scalar_one() == 0, "it leaves nothing"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_each_thing_that_is_wrong_has_a_way_out(healthy: tuple[Settings, Database]) -> None:
    settings, database = healthy
    with socket.socket() as nobody:  # bound, so that nobody else answers there; not listening
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        away = settings.model_copy(
            update={"redis_url": f"redis://127.0.0.1:{port}", "s3_endpoint": f"http://127.0.0.1:{port}"}
        )
        found = findings(away)
    assert (found["redis"].level, found["redis"].next) == ("warn", "start Redis, and check REDIS_URL")
    assert found["store"].level == "fail" and "AWS_ENDPOINT_URL_S3" in found["store"].next

    def spoil(session: Session) -> None:
        us = at_command_line()
        incident_service.pause_claims(session, us, None, "a test")
        incident_service.drain(session, us, "one", "a test", settings.renew_s)
        models.register(session, "gone", "/nowhere/model", digest="e" * 64, context_tokens=64)
        worker_queries.beat(session, "h:1:a", DIGEST, is_draining=False, stats={"clock_ms": now_ms() + 60_000})
        session.execute(update(Tally).where(Tally.name == "reaper_ticks").values(at_ms=now_ms() - 600_000))
        one_sided = LedgerTransaction(kind="topup", key="k", project_id="p", price_version=1, created_ms=1)
        session.add(one_sided)
        session.flush()
        session.add(LedgerEntry(transaction_id=one_sided.id, account="revenue", amount_nanos=7))

    database.run(spoil)
    found = findings(settings)
    for name, level, says, way in (
        ("clocks", "warn", "ahead of the database", "synchronise"),
        ("models", "warn", "gone (/nowhere/model)", "models add"),
        ("workers", "warn", "one is drained", "batchsvc workers list"),
        ("claims", "warn", "paused: all (a test)", "batchsvc claims resume"),
        ("reaper", "fail", "its last tick was 6", "control worker"),
        ("ledger", "fail", "its accounts sum to 7 nano-dollars", "batchsvc reconcile --all"),
    ):
        one = found[name]
        assert one.level == level and says in one.says and way in one.next, one


def test_an_old_schema_and_an_empty_database(settings: Settings) -> None:
    migrate.upgrade_to(settings.database_url, "0014")
    found = findings(settings)
    assert (found["database"].level, found["database"].next) == ("fail", "batchsvc db upgrade")
    assert "0014" in found["database"].says
    assert "reaper" not in found, "what needs the database isn't asked"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_a_database_that_isnt_there(settings: Settings, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'no' / 'such' / 'folder' / 'db'}"
    found = findings(settings.model_copy(update={"database_url": url}))
    assert found["database"].level == "fail" and "DATABASE_URL" in found["database"].next


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_little_space(healthy: tuple[Settings, Database], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    for free, level in ((100 * 2**20, "fail"), (2**30, "warn"), (2**40, "ok")):
        monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert findings(healthy[0])["disk"].level == level
