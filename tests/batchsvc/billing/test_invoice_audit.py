"""The audit of invoices agrees with every document that the service makes: billed, corrected, void, below 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_invoices import compare_invoices
from batchsvc.batches.reconcile_queries import Reader
from batchsvc.billing import ledger, queries
from batchsvc.billing.month import Month
from tests.batchsvc.billing.books import Books

JANUARY, FEBRUARY, MARCH, APRIL = (Month(2024, number) for number in range(1, 5))


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


def audit(books: Books) -> Report:
    reader, report = Reader(books.db.url), Report()
    compare_invoices(reader, report)
    reader.close()
    return report


def test_all_documents_add_up(books: Books) -> None:
    second = books.add_project("branch")
    for month in (JANUARY, FEBRUARY, MARCH):
        books.use(month.start_ms, [(10**6 + 7, 333, 10**6), (999, 16, 1)])
        books.use(month.end_ms - 1, [(12_345, 0, 678)], project=second, batch="b2")
    january = books.issue("2024-01")
    books.act(str(january.number), "credit_note", amount="0.02", reason="slow", key="k1")
    books.act(str(january.number), "credit_note", reason="all of it")
    february = books.issue("2024-02")
    books.act(str(february.number), "void", reason="wrong address")
    books.act(str(books.issue("2024-02").number), "pay", reason="wire")
    books.act(str(books.issue("2024-03").number), "dispute", reason="really?")
    books.issue("2024-03", project=second)
    with books.db.transaction() as session:
        back = ledger.move("refund", books.project, 30_000_000, reason="late", key="r", batch_id="b1")
        queries.insert_posting(session, back, price_version=0, created_ms=APRIL.start_ms)
    below = books.issue("2024-04")
    assert below.kind == "credit_note" and below.corrects is None
    report = audit(books)
    assert [str(difference) for difference in report.differences] == []
    assert report.invoices == 8
    books.act(str(below.number), "void", reason="twice")
    books.draft("2024-04")
    assert audit(books).num_differences == 0


def test_usage_that_came_after_the_bill_is_found(books: Books) -> None:
    books.use(JANUARY.start_ms)
    books.issue("2024-01")
    _, part = books.use(JANUARY.end_ms - 1)
    found = {str(difference.number): difference for difference in audit(books).differences}
    missing = found["usage of the month"]
    assert isinstance(missing.added_up, int) and isinstance(missing.stored, int)
    assert missing.added_up - missing.stored == part.cost_nanos
