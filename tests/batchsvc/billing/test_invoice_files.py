"""Invoices as files: names in every script survive, texts are escaped, every amount stands in each of the three."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

import pytest
from pypdf import PdfReader

from batchsvc.billing import invoice_draft, invoice_pdf, service
from batchsvc.billing.invoice_document import Document, document
from batchsvc.billing.invoice_html import html
from batchsvc.billing.invoice_pdf import pdf
from batchsvc.billing.invoice_queries import lines, read_invoice
from batchsvc.billing.month import Month
from batchsvc.errors import InvalidRequestError
from tests.batchsvc.billing.books import Books

MONTH = Month(2024, 1)
NAMES = (
    "Πέτρος",
    "ООО «Пример»",
    "شركة",
    "חברה",
    "株式会社サンプル",
    "深圳市示例有限公司",
    "주식회사",
    "Ünïcode & Søn",
)


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


def said_by(books: Books, name: str) -> Document:
    with books.db.reading() as session:
        row = read_invoice(session, name)
        assert row is not None
        return document(row, lines(session, row.id))


def text_of(data: bytes) -> str:
    return "\n".join(page.extract_text() for page in PdfReader(io.BytesIO(data)).pages)


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
def test_html_and_pdf_say_all_that_an_invoice_must(books: Books) -> None:
    for i, (prompt, cached) in enumerate([(10**6, 0), (3 * 10**6, 1_234_567), (16, 0)]):
        books.use(MONTH.start_ms + i, [(prompt, cached, 99)], model=("smollm2-135m", "<script>x</script>")[i % 2])
    made = books.issue("2024-01")
    document = said_by(books, made.id)
    page, printed = books.file(made.id, "html").decode(), text_of(books.file(made.id, "pdf"))
    payable = f"{made.payable_minor // 100}.{made.payable_minor % 100:02d} USD"
    for said in (made.number, "Batch & Søn ApS", "DK12345678", "Rue 1", "FR1", "Tax 25 %", "Rounding", payable):
        assert said in printed
        assert str(said).replace("&", "&amp;") in page
    assert "2024-01-01 to 2024-01-31" in page and "2024-01-01 to 2024-01-31" in printed
    assert "<script>" not in page and "&lt;script&gt;" in page
    for section in document.sections:
        for row in section.rows:
            assert row[5] in page and row[5] in printed
    assert pdf(document) == pdf(document), "the same invoice is the same file"


def test_every_script_survives_in_html_and_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document(
        title="Invoice",
        facts=(("Number", "INV-000001"),),
        seller=NAMES,
        buyer=("हिन्दी", "ไทย"),
        sections=(),
        totals=(),
        notes=(),
        issued_ms=0,
    )
    page, printed = html(document), text_of(pdf(document))
    for name in NAMES:
        assert name.replace("&", "&amp;") in page
        assert name in printed
    monkeypatch.setattr(invoice_pdf, "_more_fonts", list)
    with pytest.raises(InvalidRequestError, match=r"No font for the PDF has サ .*pip install 'batchsvc\[fonts\]'"):
        pdf(document)


def test_the_csv_leads_from_the_invoice_to_every_part(books: Books) -> None:
    parts = [books.use(MONTH.start_ms + i, [(1000 + i, 16, i)], batch=f"b{i % 2}") for i in range(5)]
    books.void_part(*parts[0])
    with books.db.transaction() as session:
        invoice_draft.change_party(session, books.project, {"name": '=cmd|"x"', "currency": "EUR"})
    made = books.issue("2024-01", exchange_rate="0.92")
    rows = list(csv.DictReader(io.StringIO(books.file(made.id, "csv").decode())))
    assert sum(int(row["amount_nanos"]) for row in rows) == made.net_nanos == books.used_nanos(MONTH)
    assert {(row["batch_id"], row["part_id"], int(row["amount_nanos"])) for row in rows} == {
        (owner.id, part.id, part.cost_nanos) for owner, part in parts
    }
    assert {row["invoice"] for row in rows} == {made.number}
    assert all(re.fullmatch(r"2024-01-01T00:00:00\.00\dZ", row["committed_at"]) for row in rows)
    with books.db.transaction() as session:
        refund = service.post_refund(session, books.project, 7, reason="r", key="k", batch_id="b1")
    month = str(Month.of(refund.row.created_ms))
    later = list(csv.DictReader(io.StringIO(books.file(books.draft(month, exchange_rate="0.9").id, "csv").decode())))
    assert sorted((row["kind"], row["corrects"], row["amount_nanos"]) for row in later) == [
        ("refund", made.number, "-7"),
        ("reversal", made.number, str(-parts[0][1].cost_nanos)),
    ]
