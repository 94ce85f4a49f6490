"""Numbers have no gaps and no doubles: with eight issuers at once, after refusals, and after a kill in the middle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import select

from batchsvc.billing import invoice_service
from batchsvc.billing.invoice_tables import Invoice, InvoiceLine
from batchsvc.billing.month import Month
from batchsvc.errors import InvalidRequestError
from tests.batchsvc.billing.books import Books

ISSUERS = 8
START_MS = Month(2024, 1).start_ms

KILLED = """
import os, signal, sys
from batchsvc.billing import invoice_service
from batchsvc.db.session import Database
url, name = sys.stdin.readline().split()
with Database(url).transaction() as session:
    print(invoice_service.issue(session, name).number, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


def numbers(books: Books, series: str = "INV") -> list[int]:
    with books.db.reading() as session:
        return [
            no for no in session.scalars(select(Invoice.no).where(Invoice.series == series).order_by(Invoice.no)) if no
        ]


def test_eight_issuers_at_once_leave_no_gap_and_no_double(books: Books) -> None:
    drafts = []
    for i in range(ISSUERS):
        project = books.add_project(f"p{i}", has_address=i % 4 != 3)  # every fourth is refused, after others wait
        for month in ("2024-01", "2024-02"):
            drafts.append(books.draft(month, project=project).id)

    def issue(name: str) -> str | None:
        try:
            return books.db.run(lambda session: invoice_service.issue(session, name), attempts=10).number
        except InvalidRequestError:
            return None

    twice = [name for name in drafts for _ in range(2)]  # two issuers may want the same one
    with ThreadPoolExecutor(ISSUERS) as pool:
        issued = [number for number in pool.map(issue, twice) if number]
    assert numbers(books) == list(range(1, 13))
    assert len(issued) == 24 and len(set(issued)) == 12


def test_two_invoices_of_a_month_never_both_get_a_number(books: Books) -> None:
    books.use(START_MS)
    first = books.draft("2024-01").id
    with books.db.transaction() as session:  # a second draft, as from another process that drafted at the same time
        row = session.get_one(Invoice, first)
        values = {column.name: getattr(row, column.name) for column in Invoice.__table__.columns}
        session.add(Invoice(**{**values, "id": "inv_other"}))
        session.flush()
        for line in session.scalars(select(InvoiceLine).where(InvoiceLine.invoice_id == first)).all():
            values = {column.name: getattr(line, column.name) for column in InvoiceLine.__table__.columns}
            session.add(InvoiceLine(**{**values, "invoice_id": "inv_other"}))

    def issue(name: str) -> str | None:
        try:
            return books.db.run(lambda session: invoice_service.issue(session, name), attempts=10).status
        except InvalidRequestError as refused:
            return refused.code

    with ThreadPoolExecutor(2) as pool:
        assert sorted(map(str, pool.map(issue, (first, "inv_other")))) == ["already_billed", "issued"]
    assert numbers(books) == [1]


def test_a_number_taken_by_a_process_that_is_killed_is_given_to_the_next(books: Books, tmp_path: Path) -> None:
    books.use(START_MS)
    name = books.draft("2024-01").id
    killed = subprocess.run(
        [sys.executable, "-P", "-c", KILLED],
        input=f"{books.db.url} {name}\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert killed.returncode == -9 and killed.stdout.strip() == "INV-000001", killed.stderr
    assert numbers(books) == []
    assert books.act(name, "issue")["number"] == "INV-000001"


def test_each_seller_has_a_series_of_its_own(books: Books) -> None:
    other = Books(books.db.url, BATCHSVC_SELLER_PREFIX="NORD")
    assert [books.issue("2024-01").number, other.issue("2024-01").number, books.issue("2024-02").number] == [
        "INV-000001",
        "NORD-000001",
        "INV-000002",
    ]
    other.db.dispose()
