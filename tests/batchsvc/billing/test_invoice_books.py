"""Invoices against usage and ledger on both databases: they say the same, to the nano-dollar, whatever happened."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from batchsvc.accounts import service as accounts
from batchsvc.billing import invoice_draft, queries, service
from batchsvc.billing.invoice_tables import Invoice
from batchsvc.billing.ledger import available, receivable
from batchsvc.billing.month import Month
from batchsvc.errors import InvalidRequestError, NotFoundError
from tests.batchsvc.billing.books import Books

JANUARY, FEBRUARY = Month(2024, 1), Month(2024, 2)  # February has 29 days


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


@pytest.mark.parametrize("seed", [1, 2])
def test_lines_are_the_usage_and_the_revenue_of_the_month(books: Books, seed: int) -> None:
    dice = random.Random(seed)
    edges = [m for month in (JANUARY, FEBRUARY) for m in (month.start_ms, month.end_ms - 1)]
    for i in range(25):
        moment = dice.choice([*edges, dice.randrange(JANUARY.start_ms, FEBRUARY.end_ms)])
        lines = []
        for _ in range(dice.randrange(1, 6)):
            prompt = dice.randrange(1, 500_000)
            lines.append((prompt, dice.randrange(prompt), dice.randrange(300_000)))
        owner, part = books.use(moment, lines, batch=f"b{i % 3}", model=dice.choice(["smollm2-135m", "/models/other"]))
        if dice.random() < 0.2:
            books.void_part(owner, part)
    for month in (JANUARY, FEBRUARY):
        made = books.issue(str(month))
        shown = books.show(str(made.number))
        assert sum(line["amount_nanos"] for line in shown["lines"]) == shown["net_nanos"] != 0
        assert shown["net_nanos"] == books.used_nanos(month) == books.revenue_nanos(month)
        assert shown["net_nanos"] + shown["tax_nanos"] + shown["rounding_nanos"] == shown["payable_nanos"]
        assert shown["payable_nanos"] == shown["payable_minor"] * 10**7
        tokens = {"input_tokens", "cached_input_tokens", "output_tokens", "rounding"}
        assert {line["kind"] for line in shown["lines"]} <= tokens
    assert books.balance(receivable(books.project)) < 0


def test_the_last_millisecond_belongs_to_the_month_and_the_next_one_doesn_t(books: Books) -> None:
    _, last = books.use(FEBRUARY.end_ms - 1, batch="b1")
    _, first = books.use(FEBRUARY.end_ms, [(200, 0, 9)], batch="b2")
    assert books.issue("2024-02").net_nanos == last.cost_nanos
    assert books.issue("2024-03").net_nanos == first.cost_nanos
    assert books.issue("2024-01").net_nanos == 0, "a month without usage can be issued, too"


def test_what_is_taken_back_after_the_close_lands_in_the_open_month_and_names_the_old_invoice(books: Books) -> None:
    owner, part = books.use(JANUARY.end_ms - 1)
    books.use(JANUARY.start_ms, batch="b2")
    old = books.issue("2024-01")
    before = books.show(str(old.number)), books.file(old.id, "csv")
    month = Month.of(books.void_part(owner, part))
    shown = books.show(books.draft(str(month)).id)
    assert {line["corrects"] for line in shown["lines"]} == {old.number}
    assert shown["net_nanos"] == -part.cost_nanos == books.used_nanos(month) == books.revenue_nanos(month)
    assert (books.show(str(old.number)), books.file(old.id, "csv")) == before
    csv = books.file(shown["id"], "csv").decode().splitlines()
    assert len(csv) == 2 and csv[1].endswith(f",{-part.cost_nanos},{old.number}") and f",{part.id}," in csv[1]


def test_a_refund_is_a_line_of_the_month_it_is_made_in(books: Books) -> None:
    _, part = books.use(JANUARY.start_ms)
    old = books.issue("2024-01")
    with books.db.transaction() as session:
        moved = service.post_refund(session, books.project, 1000, reason="slow", key="r1", batch_id="b1")
        month = Month.of(moved.row.created_ms)
    shown = books.show(books.draft(str(month)).id)
    assert [(line["kind"], line["amount_nanos"], line["corrects"]) for line in shown["lines"]] == [
        ("refund", -1000, old.number)
    ]
    assert shown["net_nanos"] == books.revenue_nanos(month) and part.cost_nanos > 1000


def test_a_month_is_billed_once_until_its_invoice_is_void(books: Books) -> None:
    books.use(JANUARY.start_ms)
    stale, made = books.draft("2024-01"), books.issue("2024-01")
    with pytest.raises(NotFoundError):
        books.act(stale.id, "issue")
    with pytest.raises(InvalidRequestError, match=f"is billed by {made.number}"):
        books.draft("2024-01")
    assert books.act(made.id, "issue")["number"] == made.number, "again changes nothing"
    books.act(str(made.number), "void", reason="wrong address")
    assert books.balance(receivable(books.project)) == 0
    again = books.issue("2024-01")
    assert (made.number, again.number) == ("INV-000001", "INV-000002") and again.net_nanos == made.net_nanos


def test_an_open_month_can_be_looked_at_and_not_issued(books: Books) -> None:
    with books.db.transaction() as session:
        now = session.execute(text("SELECT max(created_ms) FROM projects")).scalar_one()
    month = Month.of(now + 3_600_000)  # not over for an hour at least
    books.use(now)
    draft = books.draft(str(month))
    with pytest.raises(InvalidRequestError) as refused:
        books.act(draft.id, "issue")
    assert refused.value.code == "month_open"
    old = books.draft("2024-01")
    with books.db.transaction() as session:
        changed = {"ms": JANUARY.end_ms + 599_999, "id": old.id}
        session.execute(text("UPDATE invoices SET created_ms = :ms WHERE id = :id"), changed)
    with pytest.raises(InvalidRequestError, match="before 2024-01 was closed"):
        books.act(old.id, "issue")


CHANGES = (
    "UPDATE invoices SET net_nanos = 1 WHERE id = :id",
    "UPDATE invoices SET buyer = '{}' WHERE id = :id",
    "UPDATE invoices SET status = 'draft' WHERE id = :id",
    "UPDATE invoices SET number = NULL WHERE id = :id",
    "DELETE FROM invoices WHERE id = :id",
    "UPDATE invoice_lines SET amount_nanos = 0 WHERE invoice_id = :id",
    "DELETE FROM invoice_lines WHERE invoice_id = :id",
    "INSERT INTO invoice_lines SELECT invoice_id, 99, project_id, model, tier, kind, price_version, tokens,"
    " rate_nanos, amount_nanos, reverses, batch_id FROM invoice_lines WHERE invoice_id = :id AND no = 1",
)


def test_nobody_changes_an_issued_invoice(books: Books) -> None:
    books.use(JANUARY.start_ms)
    made = books.issue("2024-01")

    def try_to(change: str) -> None:
        with pytest.raises(DBAPIError, match="an issued invoice never changes"), books.db.transaction() as session:
            session.execute(text(change), {"id": made.id})

    for change in CHANGES:
        try_to(change)
    books.act(made.id, "dispute", reason="too high")
    books.act(made.id, "pay")
    try_to("UPDATE invoices SET status = 'issued' WHERE id = :id")


def test_a_payment_is_booked_once_under_the_invoice_s_number(books: Books) -> None:
    books.use(JANUARY.start_ms, [(10**6, 0, 10**5)])
    made = books.issue("2024-01")
    for _ in range(2):
        assert books.act(str(made.number), "pay", reason="wire 7")["status"] == "paid"
    assert books.balance(receivable(books.project)) == 0
    assert books.balance("cash") == -made.payable_nanos
    with pytest.raises(InvalidRequestError, match="is paid and can't become void"):
        books.act(made.id, "void", reason="late")


def test_credit_notes_have_numbers_of_their_own_and_end_at_what_was_billed(books: Books) -> None:
    books.use(JANUARY.start_ms, [(10**6, 0, 10**6)])
    made = books.issue("2024-01")
    first = books.act(str(made.number), "credit_note", amount="0.02", reason="slow", key="k1")
    assert books.act(str(made.number), "credit_note", amount="0.02", reason="slow", key="k1")["id"] == first["id"]
    assert (first["number"], first["corrects"], first["payable_minor"]) == ("INV-CN-000001", made.number, -2)
    with pytest.raises(InvalidRequestError, match="can still be credited"):
        books.act(str(made.number), "credit_note", amount="99.00", reason="much")
    with pytest.raises(InvalidRequestError, match="was corrected by INV-CN-000001"):
        books.act(str(made.number), "void", reason="all")
    rest = books.act(str(made.number), "credit_note", reason="all of it")
    assert rest["number"] == "INV-CN-000002"
    for field in ("net_nanos", "tax_nanos", "rounding_nanos", "payable_nanos"):
        assert getattr(made, field) + first[field] + rest[field] == 0
    for account in (receivable(books.project), "tax", "rounding"):
        assert books.balance(account) == 0
    with pytest.raises(InvalidRequestError, match=r"0\.00 USD can still be credited"):
        books.act(str(made.number), "credit_note", reason="more")
    with pytest.raises(InvalidRequestError, match="nothing is to be paid"):
        books.act("INV-CN-000001", "pay")


def test_a_payer_s_invoice_has_the_lines_of_every_project_it_pays_for(books: Books) -> None:
    team = books.add_project("team", has_address=False)
    with books.db.transaction() as session:
        twin = accounts.test_twin(session, books.project)
        with pytest.raises(InvalidRequestError, match=rf"{re.escape(twin.name)} is a project for tests"):
            invoice_draft.change_party(session, team, {"bill_to": twin.name})
        invoice_draft.change_party(session, team, {"bill_to": "acme"})
        with pytest.raises(InvalidRequestError, match="can't be billed to"):
            invoice_draft.change_party(session, books.project, {"bill_to": "team"})
    books.use(JANUARY.start_ms)
    books.use(JANUARY.end_ms - 1, [(50, 0, 2)], project=team, batch="b9")
    with pytest.raises(InvalidRequestError, match="is billed on the invoice of"):
        books.draft("2024-01", project=team)
    made = books.issue("2024-01")
    shown = books.show(made.id)
    for project in (books.project, team):
        net = sum(line["amount_nanos"] for line in shown["lines"] if line["project_id"] == project)
        assert net == books.used_nanos(JANUARY, project) == books.revenue_nanos(JANUARY, project) > 0
        assert books.statement("2024-01", project)["closing_nanos"] == -net
    assert books.balance(receivable(books.project)) == -made.payable_nanos
    with books.db.reading() as session:  # what limits are checked against is each project's own
        for project in (books.project, team):
            assert queries.funds(session, project).available_nanos == books.balance(available(project))


def test_a_prepaid_project_pays_from_its_balance(books: Books) -> None:
    with books.db.transaction() as session:
        session.execute(text("UPDATE projects SET is_prepaid = true"))
        service.post_topup(session, books.project, 10**10, reason="card", key="t1")
    books.use(JANUARY.start_ms, [(10**6, 0, 10**6)])
    made = books.issue("2024-01")
    assert made.status == "paid" and books.balance(receivable(books.project)) == 0
    held = 10**12 - made.net_nanos  # the batch hasn't been released
    assert books.balance(available(books.project)) + held == 10**10 - made.payable_nanos


def test_a_statement_shows_all_that_moved_and_adds_up(books: Books) -> None:
    books.use(JANUARY.start_ms, [(10**6, 0, 10**6)])
    books.use(JANUARY.end_ms - 1)
    books.use(FEBRUARY.start_ms)
    january = books.statement("2024-01")
    assert january["opening_nanos"] == 0 and january["closing_nanos"] == -books.used_nanos(JANUARY)
    assert [(row["kind"], row["batch_id"], row["postings"]) for row in january["movements"]] == [("part", "b1", 2)]
    assert books.statement("2024-02")["opening_nanos"] == january["closing_nanos"]
    made = books.issue("2024-01")
    books.act(made.id, "pay")
    with books.db.transaction() as session:
        service.post_credit(session, books.project, 500, reason="sorry", key="c1")
        now = Month.of(service.post_topup(session, books.project, 700, reason="card", key="t1").row.created_ms)
    today = books.statement(str(now))
    assert today["opening_nanos"] == -books.used_nanos(JANUARY) - books.used_nanos(FEBRUARY)
    moved = {row["kind"]: row["amount_nanos"] for row in today["movements"]}
    expected = {
        "tax": -made.tax_nanos,
        "rounding": -made.rounding_nanos,
        "payment": made.payable_nanos,
        "credit": 500,
        "topup": 700,
    }
    assert moved == {kind: amount for kind, amount in expected.items() if amount}
    assert today["closing_nanos"] == 1200 - books.used_nanos(FEBRUARY)


def test_terms_and_parties_are_checked_before_a_number_is_taken(books: Books) -> None:
    bare = books.add_project("bare", has_address=False)
    books.use(JANUARY.start_ms, project=bare)
    with pytest.raises(InvalidRequestError, match="takes --address"):
        books.issue("2024-01", project=bare)
    other = Books(books.db.url, BATCHSVC_SELLER_NAME="", BATCHSVC_SELLER_TAX_ID="")
    other.use(JANUARY.start_ms)
    with pytest.raises(InvalidRequestError, match="set BATCHSVC_SELLER_NAME, BATCHSVC_SELLER_TAX_ID"):
        other.issue("2024-01")
    other.db.dispose()
    with books.db.transaction() as session:
        for currency in ("XXX", "EURO"):
            with pytest.raises(InvalidRequestError, match="no currency"):
                invoice_draft.change_party(session, books.project, {"currency": currency})
        invoice_draft.change_party(session, books.project, {"currency": "JPY", "is_reverse_charge": True})
    books.use(JANUARY.start_ms, [(10**9, 0, 10**9)])
    with pytest.raises(InvalidRequestError, match="this invoice is in JPY"):
        books.draft("2024-01")
    made = books.issue("2024-01", exchange_rate="150.25")
    assert (made.number, made.exponent, made.tax, made.tax_rate_ppm) == ("INV-000001", 0, 0, 0)
    assert (made.net, made.payable_minor, made.rounding) == (7_512_500_000_000, 7_512, -500_000_000)
    books.use(FEBRUARY.start_ms, [(10**15, 0, 1)])  # ten million dollars are more nano-yen than 64 bits hold
    assert books.issue("2024-02", exchange_rate="150.25").payable_minor == 1_502_500_000
    assert "Reverse charge" in books.file(made.id, "html").decode()


def test_all_amounts_of_the_ledger_still_sum_to_0(books: Books) -> None:
    books.use(JANUARY.start_ms, [(10**6, 0, 10**6)])
    made = books.issue("2024-01")
    books.act(made.id, "credit_note", amount="0.01", reason="slow")
    books.act(made.id, "pay")
    books.void_part(*books.use(JANUARY.end_ms))
    with books.db.reading() as session:
        total = session.execute(text("SELECT SUM(amount_nanos) FROM ledger_entries")).scalar_one()
        assert total == 0 and session.get_one(Invoice, made.id).status == "paid"
