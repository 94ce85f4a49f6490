"""The audit finds one nano-dollar in every place where one can be wrong, on both databases, and nothing where all is
right: batches that run, ended, were stopped, lost parts or files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from batchsvc.batches import finalize_queries, unit_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_reader import Reader
from batchsvc.batches.reconcile_run import Auditor
from batchsvc.billing import invoice_draft, invoice_service, movements
from batchsvc.billing.month import Month
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from tests import servers
from tests.workers.conftest import DIGEST, FAST, World
from tests.workers.helpers import finish, put_part
from tests.workers.test_finalize import finalizer, run_units


@pytest.fixture
def world(migrated_url: str, s3_server: servers.S3Server, bucket: str) -> Iterator[World]:
    """As `world`, with the triggers of the migrations."""
    settings = Settings.from_env(
        {
            "DATABASE_URL": migrated_url,
            "REDIS_URL": "unix://unused",
            "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": s3_server.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
            "BATCHSVC_BUCKET": bucket,
        }
    ).model_copy(update=FAST)
    db, store = Database(settings.database_url), ObjectStore(settings)
    store.ensure_bucket()
    yield World(settings, db, store)
    db.dispose()


def audit(world: World, batch_id: str | None = None) -> Report:
    auditor = Auditor(world.settings.database_url, world.store)
    try:
        report = auditor.everything() if batch_id is None else auditor.batch(batch_id)
    finally:
        auditor.close()
    assert report is not None
    return report


def equal(world: World, batch_id: str | None = None) -> Report:
    report = audit(world, batch_id)
    assert [str(difference) for difference in report.differences] == []
    assert report.num_differences == 0
    return report


def ended_batch(world: World, **more: Any) -> str:
    batch_id = world.add_batch(**{"num_lines": 6, "unit_lines": 2, "windows": 2, "fold": 2, **more})
    run_units(world)
    assert finalizer(world).finalize(batch_id)
    return batch_id


def change(world: World, sql: str, **values: Any) -> None:
    """Changes rows as nobody can: past the triggers."""
    with world.db.transaction() as session:
        if world.db.is_sqlite:
            guards = session.execute(
                text("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE '%_no_%'")
            ).scalars()
            for name in guards.all():
                session.execute(text(f"DROP TRIGGER {name}"))
        else:
            session.execute(text("SET LOCAL session_replication_role = replica"))
        assert session.execute(text(sql), values).rowcount == 1


def test_ended_batches_are_equal(world: World) -> None:
    batch_id = ended_batch(world)
    report = equal(world, batch_id)
    assert (report.batches, report.lines, report.parts) == (1, 12, len(world.parts(batch_id)))
    with world.db.transaction() as session:
        project = world.batch(batch_id).project_id
        movements.post(session, "refund", project, 5, reason="so", key="1", batch_id=batch_id)
        movements.post(session, "topup", project, 7, reason="so", key="1")
    assert equal(world).batches == 1
