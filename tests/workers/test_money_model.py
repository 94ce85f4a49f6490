"""Money as a state machine: the real SQL on SQLite with its triggers, in any order, with retries and lost leases.

Batches reserve, extend, post parts, lose them again and release; operators top up, refund, give credit and change
prices, some of it twice. After every step: all accounts sum to 0, no line is billed twice, no reservation is negative,
no batch is over its max_cost, and no project is over its budget or balance.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import select

from batchsvc.batches import finalize_queries, service, unit_queries
from batchsvc.batches.budget_queries import Verdict
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.tables import Batch, Unit
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.billing import movements, price_book, queries
from batchsvc.billing import service as billing
from batchsvc.billing.pricing import most_nanos
from batchsvc.billing.tables import LedgerTransaction
from batchsvc.errors import InvalidRequestError, MismatchError
from batchsvc.money import Rates, line_cost_nanos
from tests.batchsvc.batches.test_budget import Treasury
from tests.workers.protocol_model import MemoryDatabase

INPUT, MOST_OUTPUT, LINES = 3, 4, 3
AMOUNT = st.integers(1, 400)
CHOICE = st.integers(0, 9)
PRICE = st.integers(0, 20)
HIGH = st.integers(0, 150)
UNITS = st.sampled_from([2, 1])
ON_QUOTA = st.sampled_from(["wait", "fail"])


@dataclass
class Holder:
    """A worker's claim of a unit, as long as the worker lives; others may have taken the unit meanwhile."""

    unit: ClaimedUnit
    rates: Rates
    granted: int = 0
    used: int = 0
    lacks: list[int] = field(default_factory=list)


class Money(RuleBasedStateMachine):
    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.db = _working_database()
        source = sqlite3.connect(self.template)
        source.backup(self.db.raw)
        source.close()
        self.treasury = Treasury(self.db)
        self.project = self.treasury.project_id
        self.holders: list[Holder] = []
        self.parts: dict[str, tuple[set[tuple[str, int]], int]] = {}  # those that count: their lines and cost
        self.moved: dict[tuple[str, str], int] = {}
        self.part_no, self.checked = 0, -1

    @initialize(
        budget=st.none() | st.integers(100, 1_000),
        money=st.none() | st.integers(0, 1_000),
        price=PRICE,
        batches=st.lists(st.tuples(HIGH, UNITS, st.none() | AMOUNT, ON_QUOTA), min_size=1, max_size=3),
    )
    def open(self, budget: int | None, money: int | None, price: int, batches: list[Any]) -> None:
        self.budget, self.is_prepaid = budget, money is not None
        self.treasury.limit(budget_nanos=budget, is_prepaid=self.is_prepaid)
        if money:
            self.treasury.topup(money)
        self.change_price(price)
        for batch in batches:
            self.begin(*batch)

    # ---- batches

    @rule(price=PRICE)
    def change_price(self, price: int) -> None:
        row = {"input": 10**6, "cached_input": 2 * 10**6, "output": price * 10**6}
        for tier in ("batch_24h", "standard"):
            self.db.run(lambda s, tier=tier: price_book.set_price(s, "m", tier, row, None))

    @rule(high=HIGH, units=UNITS, cap=st.none() | AMOUNT, on_quota=ON_QUOTA)
    def another(self, high: int, units: int, cap: int | None, on_quota: str) -> None:
        self.begin(high, units, cap, on_quota)

    def begin(self, high: int, units: int, cap: int | None, on_quota: str) -> None:
        with self.db.reading() as session:
            version = billing.current_version(session)
            rates = billing.rates_for(session, "m", "batch_24h", version)
        pinned = {"input": rates.input, "cached_input": rates.cached_input, "output": rates.output}
        self.treasury.begin(
            high,
            units=units,
            lines=LINES,
            max_cost_nanos=cap,
            on_quota=on_quota,
            price_version=version,
            rates={"tier": pinned, "standard": pinned},
        )
        self.claim()
        self.claim()

    @rule()
    def claim(self) -> None:
        for unit in self.treasury.claim():
            done = int.from_bytes(unit.done_bitmap, "little")
            lacks = [bit for bit in range(unit.num_lines) if not done >> bit & 1]
            self.holders.append(Holder(unit, Rates(**unit.rates["tier"]), lacks=lacks))

    @precondition(lambda self: self.holders)
    @rule(which=CHOICE, lines=st.integers(1, 3), output=st.integers(0, MOST_OUTPUT), cached=st.integers(0, INPUT))
    def work(self, which: int, lines: int, output: int, cached: int) -> None:
        """A worker finishes its next lines, or learns why it can't run them."""
        holder = self.holders[which % len(self.holders)]
        for _ in range(lines):
            if holder in self.holders:
                self.run_line(holder, output, cached, times=1 + output % 2)

    def run_line(self, holder: Holder, output: int, cached: int, times: int) -> None:
        if not holder.lacks:
            self.let_go(holder)
            return
        most = most_nanos(holder.rates, input_tokens=INPUT, planned_cached_tokens=0, max_tokens=MOST_OUTPUT)
        verdict = Verdict.FITS
        if holder.unit.is_metered and holder.used + most > holder.granted:
            need = holder.used + most
            grant = self.treasury.grant(
                holder.unit, holder.used + most * len(holder.lacks), used_nanos=holder.used, need_nanos=need
            )
            if grant is None:
                self.holders.remove(holder)
                return
            holder.granted, verdict = grant
        if verdict in (Verdict.LATER, Verdict.WAIT):
            self.let_go(holder)
        elif verdict is Verdict.OVER:
            self.commit(holder, 0, times, over=1)
        else:
            tokens = {"input_tokens": INPUT, "cached_tokens": cached, "output_tokens": output}
            self.commit(holder, line_cost_nanos(holder.rates, **tokens), times)

    def let_go(self, holder: Holder) -> None:
        self.holders.remove(holder)
        self.db.run(lambda s: unit_queries.release(s, holder.unit.id, holder.unit.epoch))

    def commit(self, holder: Holder, cost: int, times: int, over: int = 0) -> None:
        self.part_no += 1
        bit, part_id = holder.lacks[0], f"part{self.part_no:04}"
        part = NewPart(
            id=part_id,
            s3_key=part_id,
            sha256="x",
            size_bytes=1,
            bitmap=bytes([1 << bit]),
            lines_ok=1 - over,
            lines_err=over,
            input_tokens=INPUT,
            cached_tokens=0,
            output_tokens=1,
            cost_nanos=cost,
            standard_nanos=cost,
            over_budget=over,
        )
        for _ in range(times):  # again, because the answer was lost
            counted = self.db.run(lambda s: unit_queries.commit_part(s, holder.unit.id, holder.unit.epoch, part))
            if not counted:
                self.holders.remove(holder)
                return
        holder.lacks.pop(0)
        holder.used += cost
        self.parts[part_id] = ({(holder.unit.s3_key, bit)}, cost)

    @rule()
    def lose_leases(self) -> None:
        """Whoever held them doesn't know yet. That units are split for it is not our subject."""
        with self.db.transaction() as session:
            for unit in session.scalars(select(Unit).where(Unit.state == "leased")):
                unit.lease_ms = 0
        self.db.run(unit_queries.free_expired)
        with self.db.transaction() as session:
            for unit in session.scalars(select(Unit)):
                unit.crash_count, unit.is_suspect = 0, False

    @rule()
    def admit(self) -> None:
        self.treasury.admit()

    @rule(which=CHOICE)
    def cancel(self, which: int) -> None:
        live = self.live()
        if live:
            self.db.run(lambda s: service.cancel(s, self.project, live[which % len(live)]))

    @rule(which=CHOICE, damaged=st.none() | CHOICE)
    def finalize(self, which: int, damaged: int | None) -> None:
        """Takes back a part that is found damaged, or publishes; nothing, if the batch isn't due."""
        live = self.live()
        if live:
            self.finalize_batch(live[which % len(live)], damaged)

    def finalize_batch(self, batch_id: str, damaged: int | None) -> None:
        with self.db.transaction() as session:
            session.get_one(Batch, batch_id).fin_lease_ms = 0
        lease = self.db.run(lambda s: finalize_queries.begin(s, batch_id, "f", 1000))
        if lease is None:
            return
        with self.db.reading() as session:
            ids = [part.id for part in finalize_queries.parts(session, batch_id, 0)]
        if damaged is not None and ids:
            part_id = sorted(ids)[damaged % len(ids)]
            for _ in range(2):
                assert self.db.run(lambda s: finalize_queries.void_part(s, batch_id, lease.epoch, part_id))
            del self.parts[part_id]
            self.db.run(lambda s: finalize_queries.give_up(s, batch_id, lease.epoch))
            return
        ended = {"completed": 0, "failed": 0, "file_ttl_s": 10}
        assert self.db.run(lambda s: finalize_queries.publish(s, batch_id, lease.epoch, [], **ended))

    def live(self) -> list[str]:
        with self.db.reading() as session:
            return list(session.scalars(select(Batch.id).where(Batch.status.not_in(TERMINAL)).order_by(Batch.id)))

    # ---- operators

    @rule(kind=st.sampled_from(["topup", "payment", "refund", "credit"]), amount=AMOUNT, key=st.sampled_from("abcdef"))
    def move(self, kind: Any, amount: int, key: str) -> None:
        known = self.moved.get((kind, key))
        with self.db.reading() as session:
            left = queries.charged_nanos(session, self.project, None)

        def post(session: Any) -> movements.Moved:
            return movements.post(session, kind, self.project, amount, reason="r", key=key)

        try:
            moved = self.db.run(post)
        except MismatchError:
            assert known not in (None, amount)
        except InvalidRequestError:
            assert kind == "refund" and known is None and amount > left
        else:
            assert moved.is_new == (known is None) and known in (None, amount)
            assert kind != "refund" or known is not None or amount <= left
            self.moved[kind, key] = amount

    # ---- what holds

    @invariant()
    def check(self) -> None:
        changes = self.db.raw.total_changes
        if changes != self.checked:
            self.checked = changes
            self.books_are_right()

    def books_are_right(self) -> None:
        def ask(statement: str) -> list[Any]:
            return self.db.raw.execute(statement).fetchall()  # without the ORM: this runs after every step

        found: Counter[str] = Counter()
        for account, amount in ask("SELECT account, SUM(amount_nanos) FROM ledger_entries GROUP BY account"):
            found[account.partition(":")[0]] += amount
        assert sum(found.values()) == 0
        assert not ask("SELECT 1 FROM ledger_entries GROUP BY transaction_id HAVING SUM(amount_nanos) <> 0")
        lines = [line for its, _ in self.parts.values() for line in its]
        assert len(lines) == len(set(lines)), "no line is billed twice"
        bill = sum(cost for _, cost in self.parts.values())
        refunds = sum(amount for (kind, _), amount in self.moved.items() if kind == "refund")
        assert found["revenue"] == bill - refunds
        assert ask("SELECT COALESCE(SUM(cost_nanos), 0) FROM usage") == [(bill,)]
        assert {row[0] for row in ask("SELECT id FROM parts WHERE NOT is_void")} == self.parts.keys()
        held = 0
        for batch_id, status, cost, reserved, most, granted in ask(
            "SELECT b.id, b.status, b.cost_nanos, b.reserved_nanos, b.max_cost_nanos, (SELECT COALESCE(SUM(MAX(0,"
            " u.granted_nanos - u.spent_nanos)), 0) FROM units u WHERE u.batch_id = b.id AND u.state = 'leased')"
            " FROM batches b"
        ):
            assert cost <= reserved, f"no reservation is negative: {batch_id}"
            assert most is None or reserved <= most, "overshoot 0"
            assert granted <= reserved - cost, "what is granted is there"
            held += reserved - cost if status not in TERMINAL else 0
        assert found["reserved"] == held
        kept = ask("SELECT available_nanos, reserved_nanos, month_nanos FROM balances")
        assert kept in ([], [(found["available"], held, bill)]), "the triggers have added it up, all in one month"
        assert not self.is_prepaid or found["available"] >= 0
        assert self.budget is None or bill + held <= self.budget

    def teardown(self) -> None:
        for batch_id in self.live():
            with suppress(InvalidRequestError):
                self.db.run(lambda s, batch_id=batch_id: service.cancel(s, self.project, batch_id))
        with self.db.transaction() as session:
            for unit in session.scalars(select(Unit).where(Unit.state == "leased")):
                unit.state = "ready"
            for batch in session.scalars(select(Batch).where(Batch.status == Status.FINALIZING)):
                batch.expires_ms = batch.finalizing_ms = 1
        for batch_id in self.live():
            self.finalize_batch(batch_id, None)
        assert self.live() == []
        self.books_are_right()

    def told(self) -> set[str]:
        """The kinds of postings that there are."""
        with self.db.reading() as session:
            return set(session.scalars(select(LedgerTransaction.kind)))


@lru_cache(maxsize=1)
def _working_database() -> MemoryDatabase:
    """The one that all histories use, one after the other: its statements are compiled once."""
    return MemoryDatabase()


def _run(machine: type[Money], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        ),
    )


def test_a_history_with_every_kind_of_posting(migrated_sqlite: Path) -> None:
    """Step by step, by the rules that the random histories take: nothing here is left to chance."""
    machine = type("Fixed", (Money,), {"template": migrated_sqlite})()
    machine.open(budget=None, money=1_000, price=10, batches=[])
    machine.begin(high=20, units=1, cap=None, on_quota="wait")
    steps = [
        lambda: machine.work(which=0, lines=3, output=3, cached=1),  # 3 lines, for more than 20: extends
        lambda: machine.work(which=0, lines=1, output=0, cached=0),  # nothing is left: lets the unit go
        lambda: machine.finalize(which=0, damaged=0),
        machine.claim,
        lambda: machine.work(which=0, lines=1, output=1, cached=0),
        lambda: machine.work(which=0, lines=1, output=0, cached=0),
        *(lambda kind=kind: machine.move(kind, 5, "a") for kind in ("topup", "payment", "refund", "credit")),
        *(lambda kind=kind: machine.move(kind, 5, "a") for kind in ("topup", "payment", "refund", "credit")),
        lambda: machine.finalize(which=0, damaged=None),
    ]
    machine.check()
    for step in steps:
        step()
        machine.check()
    machine.teardown()
    kinds = {"reserve", "extend", "part", "void", "release", "topup", "payment", "refund", "credit"}
    assert machine.told() == kinds


def test_in_any_order_the_books_are_right(migrated_sqlite: Path) -> None:
    _run(type("Some", (Money,), {"template": migrated_sqlite}), examples=5, steps=25)


@pytest.mark.slow
def test_in_many_orders_the_books_are_right(migrated_sqlite: Path) -> None:
    _run(type("Many", (Money,), {"template": migrated_sqlite}), examples=200, steps=60)
