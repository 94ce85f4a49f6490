"""What was charged is given back once, whoever gives it back, and says so in costs, invoices and their files alike."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from batchsvc.billing import invoice_draft, ledger, money_api, queries, service, usage_service
from batchsvc.billing.ledger import available, receivable
from batchsvc.billing.month import Month
from batchsvc.billing.schemas import PostMovement
from batchsvc.billing.usage import Kind
from batchsvc.errors import InvalidRequestError, MismatchError, ServiceError
from tests.batchsvc.billing.books import Books

JANUARY, FEBRUARY = Month(2024, 1), Month(2024, 2)
BIG = [(10**6, 0, 10**6)]


@pytest.fixture
def books(migrated_url: str) -> Iterator[Books]:
    made = Books(migrated_url)
    yield made
    made.db.dispose()


def post(books: Books, kind: Any, nanos: int, key: str, *, project: str | None = None, batch: str | None = None) -> Any:
    body = PostMovement(amount=f"{nanos / 10**9:.9f}", reason="r", key=key, batch_id=batch)
    return books.db.run(lambda session: money_api.post(session, kind, project or books.project, body))


def costs(books: Books, **more: str) -> list[dict[str, Any]]:
    asked = [("start_time", "1704067200"), ("limit", "180"), *more.items()]  # from January 2024 on
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {"next_page": None, "has_more": True}
    while page["has_more"]:
        at = [("page", page["next_page"])] if page["next_page"] else []
        with books.db.reading() as session:
            page = usage_service.answer(session, Kind.COSTS, [*asked, *at])
        found += [result for bucket in page["data"] for result in bucket["results"]]
    return found


def test_what_was_refunded_can_t_be_credited_again(books: Books) -> None:
    _, part = books.use(JANUARY.start_ms, BIG)
    made = books.issue("2024-01")
    post(books, "refund", part.cost_nanos - 10**7, "r1", batch="b1")
    with pytest.raises(InvalidRequestError, match=r"0\.01 USD can still be credited"):
        books.act(str(made.number), "credit_note", amount="0.02", reason="again")
    note = books.act(str(made.number), "credit_note", reason="the rest")
    assert note["net_nanos"] == -(10**7) and note["payable_minor"] == -1
    with pytest.raises(InvalidRequestError, match=r"0\.00 USD can still be credited"):
        books.act(str(made.number), "credit_note", reason="more")
    with pytest.raises(InvalidRequestError, match=r"which is \$0\."):
        post(books, "refund", 1, "r2", batch="b1")
    assert books.balance("revenue") == 0


def test_what_was_credited_can_t_be_refunded_again(books: Books) -> None:
    _, part = books.use(JANUARY.start_ms, BIG)
    made = books.issue("2024-01")
    note = books.act(str(made.number), "credit_note", amount="0.02", reason="slow")
    left = part.cost_nanos + note["net_nanos"]
    for batch in ("b1", None):
        with pytest.raises(InvalidRequestError) as refused:
            post(books, "refund", left + 1, "r1", batch=batch)
        assert refused.value.code == "refund_too_large"
    post(books, "refund", left, "r1")
    assert books.balance("revenue") == 0


def test_a_payer_s_credit_note_counts_for_the_projects_that_it_pays_for(books: Books) -> None:
    team = books.add_project("team", has_address=False)
    with books.db.transaction() as session:
        invoice_draft.change_party(session, team, {"bill_to": "acme"})
    books.use(JANUARY.start_ms, BIG, project=team, batch="b9")
    made = books.issue("2024-01")
    books.act(str(made.number), "credit_note", reason="all of it")
    with pytest.raises(InvalidRequestError, match="any one invoice"):
        post(books, "refund", 1, "r1", project=team, batch="b9")


def test_a_payer_s_credit_note_for_another_project_leaves_its_own_charges_to_be_refunded(books: Books) -> None:
    team = books.add_project("team", has_address=False)
    with books.db.transaction() as session:
        invoice_draft.change_party(session, team, {"bill_to": "acme"})
    books.use(JANUARY.start_ms, BIG, project=team, batch="b9")
    made = books.issue("2024-01")
    books.act(str(made.number), "credit_note", reason="all of it")
    _, own = books.use(FEBRUARY.start_ms, [(10**6, 0, 10**5)])
    with pytest.raises(InvalidRequestError, match="the project was charged and not yet refunded"):
        post(books, "refund", own.cost_nanos + made.net_nanos + 1, "r1")
    assert post(books, "refund", own.cost_nanos, "r2")["corrects"] == "2024-02"
    assert books.balance("revenue") == 0


def test_what_a_month_takes_back_of_earlier_ones_leaves_its_own_charges_to_be_refunded(books: Books) -> None:
    _, old = books.use(JANUARY.start_ms, BIG, batch="b1")
    _, new = books.use(FEBRUARY.start_ms, BIG, batch="b2")
    january = books.issue("2024-01")
    refund_in(books, FEBRUARY, old.cost_nanos)
    february = books.issue("2024-02")
    assert february.net_nanos == 0
    with pytest.raises(InvalidRequestError, match=r"which is \$0\."):
        post(books, "refund", 1, "r1", batch="b1")
    assert post(books, "refund", new.cost_nanos, "r2", batch="b2")["corrects"] == february.number
    assert books.balance("revenue") == 0
    with pytest.raises(InvalidRequestError, match=r"0\.00 USD can still be credited"):
        books.act(str(january.number), "credit_note", reason="all")


def refund_in(books: Books, month: Month, nanos: int) -> None:
    """A refund of January's batch b1 that was made in a later month, which is over by now."""
    back = ledger.move("refund", books.project, nanos, reason="r", key="r", batch_id="b1", corrects_month="2024-01")
    with books.db.transaction() as session:
        queries.insert_posting(session, back, price_version=0, created_ms=month.start_ms)


def test_refunds_and_credit_notes_at_once_give_back_what_was_charged(books: Books) -> None:
    _, part = books.use(JANUARY.start_ms, BIG)
    made = books.issue("2024-01")
    together, given = threading.Barrier(6), []

    def give_back(no: int) -> None:
        together.wait()
        try:
            if no % 2:
                post(books, "refund", part.cost_nanos, f"r{no}", batch="b1")
            else:
                books.act(str(made.number), "credit_note", reason="all")
            given.append(no)
        except ServiceError:
            pass

    threads = [threading.Thread(target=give_back, args=(no,)) for no in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(given) == 1 and books.balance("revenue") == 0


def test_a_credit_note_s_key_is_compared_with_its_arguments(books: Books) -> None:
    books.use(JANUARY.start_ms, BIG)
    books.use(FEBRUARY.start_ms, BIG)
    made, other = books.issue("2024-01"), books.issue("2024-02")
    asked = {"amount": "0.02", "reason": "slow", "key": "k"}
    note = books.act(str(made.number), "credit_note", **asked)
    assert books.act(str(made.number), "credit_note", **asked)["id"] == note["id"]
    for name, more in (
        (made, {"amount": "0.03"}),
        (made, {"amount": None}),
        (made, {"reason": "other"}),
        (other, {}),
    ):
        with pytest.raises(MismatchError) as refused:
            books.act(str(name.number), "credit_note", **(asked | more))
        assert refused.value.code == "idempotency_key_reused" and refused.value.param == "key"
    rest = books.act(str(made.number), "credit_note", reason="all", key="k2")
    assert books.act(str(made.number), "credit_note", reason="all", key="k2")["id"] == rest["id"]


def test_a_refund_names_the_invoice_of_the_month_it_takes_back_with_a_batch_or_without(books: Books) -> None:
    _, old = books.use(JANUARY.start_ms, BIG)
    _, new = books.use(FEBRUARY.start_ms, [(10**6, 0, 10**5)])
    january = books.issue("2024-01")
    first = post(books, "refund", new.cost_nanos, "r1")
    assert first["corrects"] == "2024-02", "the newest month, which has no invoice yet"
    assert post(books, "refund", 5, "r2")["corrects"] == january.number
    assert post(books, "refund", 5, "r3", batch="b1")["corrects"] == january.number
    books.use(FEBRUARY.end_ms)
    with pytest.raises(InvalidRequestError, match="any one invoice"):
        post(books, "refund", old.cost_nanos, "r4")
    month = Month.of(first["created_at"] * 1000)
    lines = books.show(books.draft(str(month)).id)["lines"]
    assert sorted((line["amount_nanos"], line["corrects"]) for line in lines) == [
        (-new.cost_nanos, "2024-02"),
        (-5, january.number),
        (-5, january.number),
    ]


def test_the_file_of_an_issued_invoice_stays_whatever_becomes_of_what_it_corrects(books: Books) -> None:
    owner, part = books.use(JANUARY.start_ms, BIG)
    books.use(JANUARY.start_ms, batch="b2")
    old = books.issue("2024-01")
    month = Month.of(books.void_part(owner, part))
    post(books, "refund", 5, "r1", batch="b2")
    draft = books.draft(str(month))
    with books.db.transaction() as session:  # as if its month were over
        session.execute(text("UPDATE invoices SET status = 'issued' WHERE id = :id"), {"id": draft.id})
    before = books.file(draft.id, "csv")
    assert before.count(str(old.number).encode()) == 2
    books.act(str(old.number), "void", reason="wrong address")
    assert books.issue("2024-01").number != old.number
    assert books.file(draft.id, "csv") == before


def test_a_draft_that_names_an_invoice_which_is_void_by_now_has_to_be_made_again(books: Books) -> None:
    owner, part = books.use(JANUARY.start_ms, BIG)
    old = books.issue("2024-01")
    with books.db.transaction() as session:
        service.post_void(session, owner, part)
        gone = {"ms": FEBRUARY.start_ms, "id": f"void:{part.id}"}
        for table, column in (("usage", "part_id"), ("ledger_transactions", "key")):
            _allow(session, table)
            session.execute(text(f"UPDATE {table} SET created_ms = :ms WHERE {column} = :id"), gone)
    stale = books.draft("2024-02")
    books.act(str(old.number), "void", reason="wrong address")
    with pytest.raises(InvalidRequestError) as refused:
        books.act(stale.id, "issue")
    assert refused.value.code == "draft_outdated"
    assert books.issue("2024-02").net_nanos == -part.cost_nanos


def _allow(session: Any, table: str) -> None:
    if session.get_bind().dialect.name == "sqlite":
        session.execute(text(f"DROP TRIGGER IF EXISTS {table}_no_update"))
    else:
        session.execute(text(f"ALTER TABLE {table} DISABLE TRIGGER {table}_no_change"))


def test_costs_are_the_net_of_the_invoice_and_of_the_credit_notes(books: Books) -> None:
    books.use(JANUARY.start_ms, BIG)
    made = books.issue("2024-01")
    books.act(str(made.number), "credit_note", amount="0.02", reason="slow")
    now = Month.of(post(books, "refund", 7000, "r1", batch="b1")["created_at"] * 1000)
    books.use(now.start_ms, [(1000, 0, 10)], batch="b3")
    post(books, "credit", 300, "c1")
    this_month = books.draft(str(now))
    notes = -sum(row["amount_nanos"] for row in costs(books, **{"line_items[]": "credit note"}))
    assert sum(row["amount_nanos"] for row in costs(books)) == made.net_nanos + this_month.net_nanos - notes
    items = {row["line_item"]: row["amount_nanos"] for row in costs(books, group_by="line_item")}
    assert (items["refund"], items["goodwill"]) == (-7000, -300) and items["credit note"] == -notes < 0
    by_batch = {row["batch_id"]: row["amount_nanos"] for row in costs(books, group_by="batch_id")}
    assert by_batch[None] == -300 - notes and by_batch["b1"] == -7000, "of the last day that has something of it"
    assert all(row["amount_nanos"] > 0 for row in costs(books, models="smollm2-135m")), "of usage alone"
    assert sum(row["amount_nanos"] for row in costs(books, project_ids="another")) == 0


@pytest.mark.parametrize("is_prepaid", [False, True])
def test_a_goodwill_credit_lowers_the_month_s_invoice(books: Books, is_prepaid: bool) -> None:
    _, part = books.use(JANUARY.start_ms, BIG)
    with books.db.transaction() as session:
        session.execute(text("UPDATE projects SET is_prepaid = :prepaid"), {"prepaid": is_prepaid})
    if is_prepaid:
        post(books, "topup", 10**9, "t1")
    _credit_in_january(books, 10**7)
    made = books.issue("2024-01")
    shown = books.show(made.id)
    assert shown["net_nanos"] == part.cost_nanos - 10**7
    assert [line["amount_nanos"] for line in shown["lines"] if line["kind"] == "goodwill"] == [-(10**7)]
    assert b"goodwill," in books.file(made.id, "csv") and b"goodwill credit" in books.file(made.id, "html")
    held = 10**12 - part.cost_nanos  # by the batch, which hasn't been released
    rest = 10**9 - made.payable_nanos if is_prepaid else 0
    assert books.balance(available(books.project)) + held == rest
    assert books.balance(receivable(books.project)) == (0 if is_prepaid else -made.payable_nanos)


def test_a_credit_note_to_a_prepaid_project_is_money_that_it_may_spend(books: Books) -> None:
    with books.db.transaction() as session:
        session.execute(text("UPDATE projects SET is_prepaid = true"))
    post(books, "topup", 10**9, "t1")
    books.use(JANUARY.start_ms, BIG)
    made = books.issue("2024-01")
    before = books.balance(available(books.project))
    note = books.act(str(made.number), "credit_note", amount="0.02", reason="slow")
    assert note["status"] == "paid" and books.balance(available(books.project)) == before + 2 * 10**7
    assert books.balance(receivable(books.project)) == 0


def _credit_in_january(books: Books, nanos: int) -> None:
    posting = ledger.move("credit", books.project, nanos, reason="sorry", key="c1")
    with books.db.transaction() as session:
        queries.insert_posting(session, posting, price_version=0, created_ms=JANUARY.end_ms - 1)


def test_a_payment_that_came_before_isn_t_booked_again(books: Books) -> None:
    books.use(JANUARY.start_ms, BIG)
    books.use(FEBRUARY.start_ms, BIG)
    first, second = books.issue("2024-01"), books.issue("2024-02")
    post(books, "payment", first.payable_nanos + 1000, "wire 1")
    books.act(str(first.number), "pay")
    assert books.balance("cash") == -first.payable_nanos - 1000
    books.act(str(second.number), "pay")
    assert books.balance("cash") == -first.payable_nanos - second.payable_nanos
    assert books.balance(receivable(books.project)) == 0


def test_a_payment_in_part_leaves_the_rest_to_be_booked(books: Books) -> None:
    books.use(JANUARY.start_ms, BIG)
    made = books.issue("2024-01")
    post(books, "payment", 4000, "wire 1")
    books.act(str(made.number), "credit_note", amount="0.01", reason="slow")
    for _ in range(2):
        books.act(str(made.number), "pay")
    assert books.balance("cash") == -(made.payable_nanos - 10**7)
    assert books.balance(receivable(books.project)) == 0


REPLACING = {
    "ledger_transactions": ("id", "kind", "'part'"),
    "ledger_entries": ("id", "amount_nanos", "999"),
    "usage": ("part_id", "cost_nanos", "999"),
    "prices": ("id", "nanos_per_mtok", "999"),
    "invoices": ("id", "net_nanos", "999"),
    "invoice_lines": ("invoice_id", "amount_nanos", "999"),
    "invoice_corrections": ("invoice_id", "corrects", "'x'"),
}


@pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("pragma", ["ON", "OFF"])
def test_nothing_that_counts_is_replaced(books: Books, pragma: str) -> None:
    """SQLite's INSERT OR REPLACE deletes what is in its way without a word, and so do UPDATE OR REPLACE."""
    owner, part = books.use(JANUARY.start_ms, BIG)
    books.use(JANUARY.start_ms)
    old = books.issue("2024-01")
    draft = books.draft(str(Month.of(books.void_part(owner, part))))
    with books.db.transaction() as session:
        session.execute(text("UPDATE invoices SET status = 'issued', number = 'X-1' WHERE id = :id"), {"id": draft.id})
    spare = books.draft("2024-02")
    before = contents(books)
    for table, (_, changed, value) in REPLACING.items():
        with books.db.reading() as session:
            names = [row[1] for row in session.execute(text(f"PRAGMA table_info({table})"))]
        columns = ", ".join(f'"{name}"' for name in names)
        chosen = ", ".join(value if name == changed else f'"{name}"' for name in names)
        others = ", ".join("1000000 + id" if name == "id" else f'"{name}"' for name in names)
        for values in {chosen, others if "id" in names else chosen}:
            try_to(books, pragma, f"INSERT OR REPLACE INTO {table} ({columns}) SELECT {values} FROM {table}")
    for statement in (
        f"UPDATE OR REPLACE invoices SET id = '{old.id}' WHERE id = '{spare.id}'",
        f"UPDATE OR REPLACE invoices SET number = '{old.number}' WHERE id = '{spare.id}'",
    ):
        try_to(books, pragma, statement)
    after = contents(books)
    assert after["ledger_entries"][: len(before["ledger_entries"])] == before["ledger_entries"]
    for table in REPLACING.keys() - {"ledger_entries"}:
        assert after[table] == before[table], table


def try_to(books: Books, pragma: str, statement: str) -> None:
    connection = books.db.engine.raw_connection()
    connection.execute(f"PRAGMA recursive_triggers={pragma}")
    with suppress(sqlite3.DatabaseError):  # or nothing happens: what it says is a row that is known
        connection.execute(statement)
    connection.execute("PRAGMA recursive_triggers=ON")
    connection.close()


def contents(books: Books) -> dict[str, list[Any]]:
    with books.db.reading() as session:
        return {table: list(session.execute(text(f"SELECT * FROM {table} ORDER BY 1, 2"))) for table in REPLACING}


def test_a_draft_s_line_can_t_be_moved_into_an_issued_invoice(books: Books) -> None:
    books.use(JANUARY.start_ms)
    books.use(FEBRUARY.start_ms)
    made, draft = books.issue("2024-01"), books.draft("2024-02")
    ids = {"to": made.id, "of": draft.id}
    with books.db.transaction() as session:
        session.execute(text("INSERT INTO invoice_corrections VALUES (:of, 'k', 'INV-1')"), ids)
    for table in ("invoice_lines", "invoice_corrections"):
        changed = "no = no + 90, " if table == "invoice_lines" else ""
        move = f"UPDATE {table} SET {changed}invoice_id = :to WHERE invoice_id = :of"
        with pytest.raises(DBAPIError, match="an issued invoice never changes"), books.db.transaction() as session:
            session.execute(text(move), ids)
    with pytest.raises(DBAPIError, match="an issued invoice never changes"), books.db.transaction() as session:
        session.execute(text("INSERT INTO invoice_corrections VALUES (:to, 'k', 'INV-1')"), ids)


@pytest.mark.parametrize("migrated_url", ["postgresql"], indirect=True)
def test_nothing_is_written_while_reading_on_postgresql(books: Books) -> None:
    for way in (books.db.reading, books.db.snapshot):
        with pytest.raises(DBAPIError, match="read-only transaction"), way() as session:
            session.execute(text("UPDATE projects SET weight = 2"))
    with books.db.transaction() as session:
        session.execute(text("UPDATE projects SET weight = 2"))
