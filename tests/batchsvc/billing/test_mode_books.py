"""What test keys use is in a ledger of its own, in no answer of an operator's, and on no bill; on both databases."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sqlalchemy import func, select

from batchsvc import ids, mode
from batchsvc.accounts import service as accounts
from batchsvc.batches import magic_queries
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Unit
from batchsvc.billing import service, usage_service
from batchsvc.billing.ledger import REVENUE, TEST_REVENUE
from batchsvc.billing.tables import LedgerEntry
from batchsvc.billing.usage import Kind
from batchsvc.clock import now_ms
from batchsvc.errors import InvalidRequestError
from tests.batchsvc.billing.books import Books


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


@pytest.fixture
def twin(books: Books) -> str:
    with books.db.transaction() as session:
        made = accounts.test_twin(session, books.project)
        assert accounts.test_twin(session, books.project).id == made.id  # it is made once
        return made.id


def costs(books: Books, *, test: str | None = None, **asked: str) -> int:
    arguments = [("start_time", str(int(time.time()) - 86_400)), *asked.items()]
    with books.db.reading() as session:
        page = usage_service.answer(session, Kind.COSTS, arguments, test_project_id=test)
    return sum(result["amount_nanos"] for bucket in page["data"] for result in bucket["results"])


def test_usage_of_tests_is_in_no_other_answer(books: Books, twin: str) -> None:
    _, part = books.use(now_ms(), batch="b1")
    _, tried = books.use(now_ms(), [(900, 0, 50)], project=twin, batch="b2")
    assert costs(books) == part.cost_nanos
    assert costs(books, test=twin) == tried.cost_nanos
    assert costs(books, test=twin, project_ids=books.project) == tried.cost_nanos  # its own, whatever it asks for
    assert costs(books, project_ids=twin) == 0
    assert costs(books, project_ids=books.project) == part.cost_nanos
    with books.db.reading() as session:
        sums = dict(
            session.execute(
                select(LedgerEntry.account, func.sum(LedgerEntry.amount_nanos)).group_by(LedgerEntry.account)
            ).all()
        )
    assert int(sums[REVENUE]) == part.cost_nanos
    assert int(sums[TEST_REVENUE]) == tried.cost_nanos
    assert sum(int(amount) for amount in sums.values()) == 0


def test_a_project_for_tests_is_no_tenant(books: Books, twin: str) -> None:
    assert mode.is_test(twin)
    with books.db.reading() as session:
        assert accounts.has_test_project(session)
        assert twin not in {project.id for project in accounts.list_projects(session)}
    with pytest.raises(InvalidRequestError, match="is never billed"):
        books.draft("2026-01", project=twin)
    with books.db.transaction() as session:
        for post in (service.post_topup, service.post_credit, service.post_payment):
            with pytest.raises(InvalidRequestError, match="has no money"):
                post(session, twin, 100, reason="r", key="k")
        with pytest.raises(InvalidRequestError, match="can't be an admin key"):
            accounts.create_key(session, twin, "x", is_admin=True)
        row, text = accounts.create_key(session, twin, "x")
        assert text.startswith(f"sk_test_{row.id}_")
    with books.db.reading() as session:
        assert accounts.caller(session, text).project_id == twin


def test_before_the_first_test_key_there_is_nothing_to_run(books: Books) -> None:
    with books.db.reading() as session:
        assert not accounts.has_test_project(session)


@pytest.mark.parametrize("is_test", [True, False])
def test_only_batches_of_tests_can_be_told_to_expire(books: Books, twin: str, is_test: bool) -> None:
    project, far_ms = twin if is_test else books.project, now_ms() + 86_400_000
    with books.db.transaction() as session:
        batch = Batch(**_columns(Batch, project), status=Status.IN_PROGRESS, expires_ms=far_ms)
        session.add(batch)
        session.flush()
        unit = Unit(**_columns(Unit, project), batch_id=batch.id)
        session.add(unit)
        session.flush()
        batch_id, unit_id = batch.id, unit.id
    books.db.run(lambda session: magic_queries.expire_soon(session, unit_id, 5))
    with books.db.reading() as session:
        left_ms = session.get_one(Batch, batch_id).expires_ms - now_ms()
    assert (left_ms <= 6_000) == is_test


def _columns(table: type[Batch] | type[Unit], project: str) -> dict[str, object]:
    """Something for each column that must have a value."""
    given: dict[str, object] = {"id": ids.random_text(12), "project_id": project}
    for column in table.__table__.columns:
        needs = not column.nullable and column.default is None and column.server_default is None
        if needs and column.name not in (*given, "status", "expires_ms", "batch_id"):
            kind = column.type.python_type
            given[column.key] = kind() if kind is not str else "x"
    return given
