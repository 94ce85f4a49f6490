"""What operators post: once a key, never refunding more than was charged; and a ledger that nobody can change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from batchsvc.billing import limits, queries, service
from batchsvc.billing.ledger import CASH, CREDITS, REVENUE, available, receivable, reserved
from batchsvc.billing.tables import Balance, LedgerEntry, LedgerTransaction
from batchsvc.db.session import Database
from batchsvc.errors import InvalidRequestError, MismatchError

BATCH = SimpleNamespace(
    id="b1",
    project_id="p",
    api_key_id="k",
    model_id="m",
    tier="batch_24h",
    endpoint="/v1/chat/completions",
    price_version=1,
    reserved_nanos=1000,
    fin_epoch=1,
)


@pytest.fixture
def db(migrated_url: str) -> Iterator[Database]:
    database = Database(migrated_url)
    with database.transaction() as session:
        service.seed_prices(session)
        _charge(session, "part1", 700)
    yield database
    database.dispose()


def _charge(session: Session, part_id: str, cost: int) -> None:
    part = SimpleNamespace(
        id=part_id, lines_ok=1, input_tokens=1, cached_tokens=0, output_tokens=1, cost_nanos=cost, created_ms=10**12
    )
    service.post_reserve(session, BATCH)
    service.post_part(session, BATCH, part)


def balances(db: Database) -> dict[str, int]:
    with db.reading() as session:
        summed = select(LedgerEntry.account, func.sum(LedgerEntry.amount_nanos)).group_by(LedgerEntry.account)
        return {row[0]: int(row[1]) for row in session.execute(summed)}


def post(db: Database, kind: str, amount: int, key: str, **more: Any) -> bool:
    with db.transaction() as session:
        posted = getattr(service, f"post_{kind}")(session, "p", amount, reason="because", key=key, **more)
        return bool(posted.is_new)


def test_each_movement_has_its_accounts_its_reason_and_its_key(db: Database) -> None:
    for kind, amount in (("topup", 5_000), ("payment", 400), ("refund", 50), ("credit", 6)):
        assert post(db, kind, amount, "k1", actor="key1") is True
        assert post(db, kind, amount, "k1", actor="key2") is False, "the same key is the same movement"
    assert balances(db) == {
        CASH: -5_400,
        CREDITS: -6,
        REVENUE: 700 - 50,
        available("p"): -1000 + 5_000 + 50 + 6,
        receivable("p"): 400,
        reserved("p"): 300,
    }
    assert sum(balances(db).values()) == 0
    with db.reading() as session:
        rows = session.scalars(select(LedgerTransaction).where(LedgerTransaction.reason.is_not(None))).all()
        assert {(row.reason, row.actor, row.batch_id, row.price_version) for row in rows} == {
            ("because", "key1", None, 0)
        }
        stored = session.get_one(Balance, "p")
        assert (stored.available_nanos, stored.reserved_nanos) == (4_056, 300), "kept by the database itself"


def test_two_equal_refunds_are_two_and_one_key_is_one(db: Database) -> None:
    assert post(db, "refund", 300, "first", batch_id="b1")
    assert post(db, "refund", 300, "second", batch_id="b1")
    assert not post(db, "refund", 300, "second", batch_id="b1")
    assert balances(db)[REVENUE] == 100
    with pytest.raises(MismatchError) as refused:
        post(db, "refund", 100, "second", batch_id="b1")
    assert refused.value.code == "idempotency_key_reused"
    with pytest.raises(MismatchError):
        post(db, "refund", 300, "second", batch_id=None)


@pytest.mark.parametrize("kind", ["payment", "credit"])
def test_a_batch_that_the_project_does_not_have_is_refused(db: Database, kind: str) -> None:
    before = balances(db)
    with pytest.raises(InvalidRequestError, match="has no batch 'b9'"):
        post(db, kind, 5, "k", batch_id="b9")
    assert balances(db) == before


def test_a_refund_larger_than_the_charge_is_refused(db: Database) -> None:
    for amount, batch_id in ((701, "b1"), (701, None), (1, "another")):
        with pytest.raises(InvalidRequestError) as refused:
            post(db, "refund", amount, "k", batch_id=batch_id)
        assert refused.value.code == "refund_too_large"
    assert post(db, "refund", 600, "k", batch_id="b1")
    with pytest.raises(InvalidRequestError, match=r"\$0\.0000001\b"):
        post(db, "refund", 101, "k2", batch_id="b1")
    assert post(db, "refund", 100, "k3"), "what is left"
    with pytest.raises(InvalidRequestError):
        post(db, "refund", 1, "k4", batch_id="b1")  # the project's refunds are of the same charge
    assert balances(db)[REVENUE] == 0


@pytest.mark.parametrize("amount", [0, -1, 10**19])
def test_amounts_that_cannot_be_are_refused(db: Database, amount: int) -> None:
    for kind in ("topup", "payment", "refund", "credit"):
        with pytest.raises(InvalidRequestError):
            post(db, kind, amount, "k")
    for wrong in ("", " ", "x" * 81, "a\nb"):
        with pytest.raises(InvalidRequestError, match="key"):
            post(db, "topup", 1, wrong)


def test_refunds_at_once_never_exceed_the_charge(db: Database) -> None:
    together, outcomes = threading.Barrier(6), []

    def refund(no: int) -> None:
        together.wait()
        try:
            outcomes.append(db.run(lambda s: service.post_refund(s, "p", 300, reason="r", key=f"k{no}")).is_new)
        except InvalidRequestError:
            outcomes.append(False)

    threads = [threading.Thread(target=refund, args=(no,)) for no in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 4 + [True] * 2
    assert balances(db)[REVENUE] == 100


@pytest.mark.parametrize("table", ["ledger_transactions", "ledger_entries", "usage", "prices"])
def test_what_is_written_stays(db: Database, table: str) -> None:
    column = {"ledger_entries": "amount_nanos", "prices": "nanos_per_mtok"}.get(table, "created_ms")
    statements = [f"UPDATE {table} SET {column} = {column} + 1", f"DELETE FROM {table}"]
    if not db.is_sqlite:
        statements.append(f"TRUNCATE {table} CASCADE")
    with db.reading() as session:
        before = session.execute(text(f"SELECT * FROM {table} ORDER BY 1")).all()
    assert before
    for statement in statements:
        with pytest.raises(DBAPIError, match="append-only"), db.transaction() as session:
            session.execute(text(statement))
    with db.reading() as session:
        assert session.execute(text(f"SELECT * FROM {table} ORDER BY 1")).all() == before


def test_a_month_counts_from_its_first_millisecond(db: Database) -> None:
    """A charge belongs to the UTC month of its part's commit; one that comes late doesn't count for the next month."""
    year, month = 32_472_144_000_000, 2999 * 12  # the first millisecond of the year 2999
    for no, (at, cost, counts) in enumerate(
        (
            (year - 1, 5, (month - 1, 5)),
            (year, 7, (month, 7)),
            (year - 1, 9, (month, 7)),
            (year + 1, 11, (month, 18)),
            (year + 31 * 86_400_000 - 1, 13, (month, 31)),
            (year + 31 * 86_400_000, 17, (month + 1, 17)),
        )
    ):
        part = SimpleNamespace(
            id=f"more{no}", lines_ok=1, input_tokens=1, cached_tokens=0, output_tokens=1, cost_nanos=cost, created_ms=at
        )
        with db.transaction() as session:
            service.post_part(session, BATCH, part)
            found = queries.funds(session, "p")
            assert (found.month, found.month_nanos) == counts
            assert limits.month_no(at) == (month - 1 if at < year else counts[0])
            assert limits.charged_nanos(found, year - 1) == (5 if counts[0] < month else 0)
