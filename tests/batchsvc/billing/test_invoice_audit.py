"""The audit of invoices agrees with every document that the service makes: billed, corrected, void, below 0."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_invoices import compare_invoices
from batchsvc.batches.reconcile_queries import Reader
from batchsvc.billing import invoice_draft, ledger, queries, service
from batchsvc.billing.month import Month
from batchsvc.errors import InvalidRequestError
from batchsvc.money import format_dollars
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
        sorry = ledger.move("credit", books.project, 20_000_000, reason="sorry", key="c")
        queries.insert_posting(session, sorry, price_version=0, created_ms=APRIL.start_ms)
    below = books.issue("2024-04")
    assert below.kind == "credit_note" and below.corrects is None
    report = audit(books)
    assert [str(difference) for difference in report.differences] == []
    assert report.invoices == 8
    books.act(str(below.number), "void", reason="twice")
    books.draft("2024-04")
    assert audit(books).num_differences == 0


def test_a_month_s_credit_note_is_void_only_while_nothing_was_paid_with_it(books: Books) -> None:
    _, part = books.use(JANUARY.start_ms, [(10**6, 0, 10**6)])
    books.act(str(books.issue("2024-01").number), "pay", reason="wire")
    with books.db.transaction() as session:
        back = ledger.move("refund", books.project, part.cost_nanos, reason="late", key="r", corrects_month="2024-01")
        queries.insert_posting(session, back, price_version=0, created_ms=FEBRUARY.start_ms)
    note = books.issue("2024-02")
    books.act(str(note.number), "void", reason="before")
    note = books.issue("2024-02")
    assert note.kind == "credit_note" and note.payable_nanos < 0
    books.use(MARCH.start_ms, [(10**6, 0, 10**5)])
    march = books.issue("2024-03")
    books.act(str(march.number), "pay", reason="wire")
    used = format_dollars(march.payable_nanos)
    with pytest.raises(InvalidRequestError, match=re.escape(f"{used} of it paid for other invoices: post a payment")):
        books.act(str(note.number), "void", reason="after")
    assert audit(books).num_differences == 0
    with books.db.transaction() as session:
        service.post_payment(session, books.project, march.payable_nanos, reason="wire", key="instead")
    books.act(str(note.number), "void", reason="after")
    assert [str(difference) for difference in audit(books).differences] == []


def test_usage_that_came_after_the_bill_is_found(books: Books) -> None:
    books.use(JANUARY.start_ms)
    books.issue("2024-01")
    _, part = books.use(JANUARY.end_ms - 1)
    found = {str(difference.number): difference for difference in audit(books).differences}
    missing = found["usage of the month"]
    assert isinstance(missing.added_up, int) and isinstance(missing.stored, int)
    assert missing.added_up - missing.stored == part.cost_nanos


def test_documents_beside_refunds_and_in_other_currencies_add_up(books: Books) -> None:
    for month in (JANUARY, FEBRUARY, MARCH):
        books.use(month.start_ms, [(10**6 + 7, 333, 10**6), (999, 16, 1)], batch=f"b{month.month}")
    with books.db.transaction() as session:
        service.post_payment(session, books.project, 12_345, reason="wire", key="before")
    january = books.issue("2024-01")
    with books.db.transaction() as session:
        service.post_refund(session, books.project, 7_654_321, reason="slow", key="r", batch_id="b1")
    books.act(str(january.number), "credit_note", amount="0.02", reason="slow")
    books.act(str(january.number), "credit_note", reason="the rest")
    books.act(str(january.number), "pay", reason="nothing is left")
    with books.db.transaction() as session:
        invoice_draft.change_party(session, books.project, {"currency": "JPY"})
    yen = books.issue("2024-02", exchange_rate="150.257")
    books.act(str(yen.number), "credit_note", amount="3", reason="slow")
    books.act(str(yen.number), "pay", reason="wire")
    with books.db.transaction() as session:
        invoice_draft.change_party(session, books.project, {"currency": "USD"})
        session.execute(text("UPDATE projects SET is_prepaid = true"))
        service.post_topup(session, books.project, 10**9, reason="card", key="t")
    books.issue("2024-03")
    assert [str(difference) for difference in audit(books).differences] == []


@pytest.mark.parametrize(
    ("column", "found"),
    [
        ("tax_nanos", {"payable_nanos", "tax_nanos"}),
        ("rounding_nanos", {"payable_nanos", "rounding_nanos"}),
        ("payable_nanos", {"payable_nanos"}),
        ("tax", {"net + tax + rounding", "tax"}),
        ("rounding", {"net + tax + rounding", "rounding"}),
        ("net", {"net + tax + rounding", "net"}),
        ("payable_minor", {"net + tax + rounding", "payable_minor"}),
        ("tax_rate_ppm", {"tax", "tax_nanos"}),
    ],
)
@pytest.mark.parametrize("is_note", [False, True])
def test_an_amount_that_its_rates_don_t_make_is_found(
    books: Books, column: str, found: set[str], is_note: bool
) -> None:
    """By one nano-dollar or nano-unit, as only a draft could be changed to."""
    books.use(JANUARY.start_ms, [(10**6 + 7, 333, 10**6)])
    with books.db.transaction() as session:
        _thaw(session)
    made = books.issue("2024-01")
    number = made.number
    if is_note:
        number = books.act(str(made.number), "credit_note", amount="0.02", reason="slow")["number"]
    assert audit(books).num_differences == 0
    value = f"{column} + 1"
    if column in ("net", "tax", "rounding"):
        value = f"CAST(CAST({column} AS BIGINT) + 1 AS VARCHAR(40))"
    if column == "tax_rate_ppm":
        value = "500000"
    with books.db.transaction() as session:
        session.execute(text(f"UPDATE invoices SET {column} = {value} WHERE number = :number"), {"number": number})
    numbers = {difference.number for difference in audit(books).differences}
    assert numbers & found, numbers


def _thaw(session: Session) -> None:
    if session.get_bind().dialect.name == "sqlite":
        session.execute(text("DROP TRIGGER invoices_no_update"))
    else:
        session.execute(text("ALTER TABLE invoices DISABLE TRIGGER invoices_no_change"))


def test_an_invoice_that_is_paid_by_nothing_is_found(books: Books) -> None:
    books.use(JANUARY.start_ms, [(10**6, 0, 10**6)])
    made = books.issue("2024-01")
    with books.db.transaction() as session:
        session.execute(text("UPDATE invoices SET status = 'paid' WHERE id = :id"), {"id": made.id})
    (found,) = audit(books).differences
    assert (found.place, found.stored) == (f"payments of {books.project}", -made.payable_nanos)


def test_a_payment_of_an_invoice_that_isn_t_paid_is_found(books: Books) -> None:
    books.use(JANUARY.start_ms, [(10**6, 0, 10**6)])
    made = books.issue("2024-01")
    with books.db.transaction() as session:
        key = f"invoice:{made.number}"
        service.post_payment(session, books.project, made.payable_nanos + 1, reason="twice", key=key)
    found = {(difference.number, difference.stored) for difference in audit(books).differences}
    assert found == {("state of the invoice", "issued"), ("amount", made.payable_nanos + 1)}
