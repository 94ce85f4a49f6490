"""What each release has left is upgraded on both databases without the loss of a value; tests/faults finishes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, select, text

from batchsvc.batches import snapshot_queries
from batchsvc.batches.reconcile_run import Auditor
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from tests.golden.load import Golden

Tables = dict[str, list[tuple[Any, ...]]]


def rows_of(database: Database, known: MetaData) -> Tables:
    """The rows of these tables, in these columns."""
    with database.reading() as session:
        return {
            table.name: sorted(map(tuple, session.execute(select(table))), key=repr) for table in known.sorted_tables
        }


@pytest.mark.parametrize("golden", Golden.every(), ids=lambda golden: golden.release)
def test_an_upgrade_keeps_every_value(golden: Golden, settings: Settings, tmp_path: Path) -> None:
    store = ObjectStore(settings)
    golden.load(settings.database_url, store, tmp_path)
    database = Database(settings.database_url)
    known = MetaData()
    with database.reading() as session:
        known.reflect(session.connection())
    known.remove(known.tables["alembic_version"])
    before = rows_of(database, known)
    assert migrate.current(settings.database_url) == golden.revision
    assert {name for name, rows in before.items() if rows} >= {"batches", "units", "parts", "invoices", "uploads"}
    migrate.upgrade(settings.database_url)
    assert rows_of(database, known) == before
    with database.reading() as session:
        needed = set(snapshot_queries.named_keys(session))
        assert session.execute(text("SELECT sum(amount_nanos) FROM ledger_entries")).scalar_one() == 0
    assert needed <= {key for key, _ in golden.objects()}
    auditor = Auditor(settings.database_url, store)
    report = auditor.everything()
    auditor.close()
    database.dispose()
    assert not report.num_differences, [str(difference) for difference in report.differences]
    assert (report.invoices, report.batches) == (1, len(golden.batches))
