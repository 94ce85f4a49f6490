"""Postings balance, and replays in any order change nothing; checked in memory and on both databases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from batchsvc import tables
from batchsvc.billing import ledger, service
from batchsvc.billing.ledger import REVENUE, available, reserved
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction, UsageRow
from batchsvc.db.session import Database

COSTS = st.lists(st.integers(0, 10**12), max_size=8)


@given(COSTS, st.sets(st.integers(0, 7)), st.integers(0, 10**12), st.randoms(use_true_random=False))
def test_any_order_of_replayed_postings_ends_in_the_same_balances(
    costs: list[int], damaged: set[int], spare: int, order: random.Random
) -> None:
    reservation = sum(costs) + spare
    postings = [ledger.reserve("p", "b", reservation)]
    postings += [ledger.part("p", "b", f"part{i}", cost) for i, cost in enumerate(costs)]
    postings += [ledger.void("p", "b", f"part{i}", cost) for i, cost in enumerate(costs) if i in damaged]
    costs = [cost for i, cost in enumerate(costs) if i not in damaged]
    sent = postings * 3
    order.shuffle(sent)
    balances: Counter[str] = Counter()
    keys: set[str] = set()
    for posting in sent:
        assert sum(amount for _, amount in posting.entries()) == 0
        if posting.key not in keys:
            keys.add(posting.key)
            for account, amount in posting.entries():
                balances[account] += amount
    for account, amount in ledger.release("p", "b", 1, balances[reserved("p")]).entries():
        balances[account] += amount
    assert balances[reserved("p")] == 0
    assert balances[REVENUE] == sum(costs)
    assert balances[available("p")] == -sum(costs)


def test_negative_amounts_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        ledger.reserve("p", "b", -1)
    with pytest.raises(ValueError, match="negative"):
        ledger.part("p", "b", "x", -1)
    with pytest.raises(ValueError, match="negative"):
        ledger.void("p", "b", "x", -1)


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    tables.metadata.create_all(database.engine)
    yield database
    database.dispose()


def batch(**changes: object) -> SimpleNamespace:
    values = {
        "id": "b1",
        "project_id": "p1",
        "api_key_id": "k1",
        "model_id": "m",
        "tier": "batch_24h",
        "endpoint": "/v1/chat/completions",
        "price_version": 1,
        "reserved_nanos": 1000,
        "fin_epoch": 1,
    }
    return SimpleNamespace(**(values | changes))


def part(no: int, cost: int) -> SimpleNamespace:
    return SimpleNamespace(
        id=f"part{no}",
        lines_ok=2,
        input_tokens=10,
        cached_tokens=4,
        output_tokens=3,
        cost_nanos=cost,
        created_ms=1000 + no,
    )


def balance(db: Database, account: str) -> int:
    with db.reading() as session:
        query = select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0)).where(LedgerEntry.account == account)
        return int(session.scalar(query) or 0)


def test_two_phases_on_a_real_database_with_every_posting_repeated(db: Database) -> None:
    owner, parts = batch(), [part(1, 300), part(2, 0), part(3, 450)]
    with db.transaction() as session:
        assert service.post_reserve(session, owner) is True
        assert service.post_reserve(session, owner) is False
    assert balance(db, reserved("p1")) == 1000
    assert balance(db, available("p1")) == -1000
    for item in (*parts, *reversed(parts)):
        with db.transaction() as session:
            service.post_part(session, owner, item)
    assert balance(db, reserved("p1")) == 250
    for fin_epoch in (1, 1, 2):
        with db.transaction() as session:
            service.post_release(session, batch(fin_epoch=fin_epoch))
            service.post_reserve(session, owner)
    assert balance(db, reserved("p1")) == 0
    assert balance(db, available("p1")) == -750
    assert balance(db, REVENUE) == 750
    with db.reading() as session:
        sums = session.execute(
            select(func.sum(LedgerEntry.amount_nanos), func.count()).group_by(LedgerEntry.transaction_id)
        ).all()
        assert all(tuple(row) == (0, 2) for row in sums)
        keys = session.scalars(select(LedgerTransaction.key)).all()
        assert sorted(keys) == ["part:part1", "part:part2", "part:part3", "release:b1:1", "release:b1:2", "reserve:b1"]
        assert session.scalar(select(func.sum(UsageRow.cost_nanos))) == 750
        assert session.scalar(select(func.sum(UsageRow.requests))) == 6


def test_a_void_part_is_as_if_it_had_never_been(db: Database) -> None:
    owner = batch()
    with db.transaction() as session:
        service.post_reserve(session, owner)
        for item in (part(1, 300), part(2, 200)):
            service.post_part(session, owner, item)
    for is_new in (True, False):
        with db.transaction() as session:
            assert service.post_void(session, owner, part(1, 300)) is is_new
    assert (balance(db, reserved("p1")), balance(db, REVENUE)) == (800, 200)
    with db.reading() as session:
        sums = session.execute(
            select(
                func.sum(UsageRow.cost_nanos),
                func.sum(UsageRow.requests),
                func.sum(UsageRow.input_tokens),
                func.sum(UsageRow.cached_tokens),
                func.sum(UsageRow.output_tokens),
            )
        ).one()
        assert tuple(sums) == (200, 2, 10, 4, 3)


def test_a_posting_is_undone_with_its_transaction(db: Database) -> None:
    def post_and_fail() -> None:
        with db.transaction() as session:
            service.post_reserve(session, batch())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        post_and_fail()
    assert balance(db, reserved("p1")) == 0
    with db.transaction() as session:
        assert service.post_reserve(session, batch()) is True
