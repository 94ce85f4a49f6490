"""Money as a state machine: the real SQL on SQLite with its triggers, in any order, with retries and lost leases.

Batches of several projects reserve, extend, post parts, lose them again and release; operators top up, refund, give
credit and change prices, some of it twice; months end, are billed, paid, disputed, made void and corrected. After every
step: all accounts sum to 0, no line is billed twice, nothing is given back twice, no reservation is negative, no batch
is over its max_cost, and no project is over its budget or balance. At the end the audit, which shares nothing with what
is audited, finds no difference.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

from batchsvc.accounts import service as accounts
from batchsvc.batches import finalize_queries, service, unit_queries
from batchsvc.batches.budget_queries import Verdict
from batchsvc.batches.lifecycle import TERMINAL, Status
from batchsvc.batches.reconcile import Report
from batchsvc.batches.reconcile_invoices import compare_invoices
from batchsvc.batches.reconcile_ledger import compare_books
from batchsvc.batches.reconcile_queries import Snapshot
from batchsvc.batches.tables import Batch, Unit
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.billing import (
    invoice_api,
    invoice_draft,
    invoice_service,
    limits,
    movements,
    price_book,
    queries,
)
from batchsvc.billing import service as billing
from batchsvc.billing.invoice_schemas import Change, ChangeParty
from batchsvc.billing.invoice_tables import Invoice
from batchsvc.billing.month import Month
from batchsvc.billing.pricing import most_nanos
from batchsvc.billing.tables import LedgerTransaction
from batchsvc.errors import InvalidRequestError, MismatchError
from batchsvc.money import Rates, line_cost_nanos
from batchsvc.settings import Settings
from tests.batchsvc.batches.test_budget import Treasury
from tests.batchsvc.billing.books import SELLER
from tests.workers.protocol_model import MemoryDatabase

INPUT, MOST_OUTPUT, LINES = 3, 4, 3
AMOUNT = st.integers(1, 400)
CHOICE = st.integers(0, 9)
PRICE = st.integers(0, 20)
LIMIT = st.tuples(st.none() | st.integers(100, 1_000), st.none() | st.integers(0, 1_000))  # budget, prepaid money
BEGIN_MS, NEVER_MS = Month(2040, 1).start_ms, Month(2090, 1).start_ms
SETTINGS = Settings.from_env({"DATABASE_URL": "sqlite:///unused", "REDIS_URL": "redis://127.0.0.1:1", **SELLER})
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
        self.clock_ms = BEGIN_MS
        self.db.raw.create_function("julianday", 1, self._julianday)
        self.treasury = Treasury(self.db)
        with self.db.transaction() as session:
            other = accounts.create_project(session, "other").id
            for project in (self.treasury.project_id, other):
                body = ChangeParty(name=project, address="Rue 1", country="FR", tax_id="FR1", tax_rate="19.6")
                invoice_api.change_party(session, project, body)
        self.projects = [self.treasury.project_id, other]
        self.budgets: dict[str, int | None] = {}
        self.prepaid: set[str] = set()
        self.notes: dict[str, tuple[str, str | None]] = {}  # credit notes by key: the invoice and the amount
        self.holders: list[Holder] = []
        self.parts: dict[str, tuple[set[tuple[str, int]], int]] = {}  # those that count: their lines and cost
        self.moved: dict[tuple[str, str, str], int] = {}  # by project, kind and key
        self.part_no, self.checked = 0, -1

    def _julianday(self, _: str) -> float:
        """The database's clock: a millisecond passes whenever it is read."""
        self.clock_ms += 1
        return 2440587.5 + (self.clock_ms + 0.5) / 86_400_000

    @initialize(
        limits=st.tuples(LIMIT, LIMIT),
        pays_for_other=st.booleans(),
        price=PRICE,
        batches=st.lists(st.tuples(CHOICE, HIGH, UNITS, st.none() | AMOUNT, ON_QUOTA), min_size=1, max_size=3),
    )
    def open(self, limits: Any, pays_for_other: bool, price: int, batches: list[Any]) -> None:
        for project, (budget, money) in zip(self.projects, limits, strict=True):
            self.treasury.project_id = project
            self.budgets[project] = budget
            if money is not None:
                self.prepaid.add(project)
            self.treasury.limit(budget_nanos=budget, is_prepaid=money is not None)
            if money:
                self.treasury.topup(money)
        if pays_for_other and self.projects[1] not in self.prepaid:
            with self.db.transaction() as session:
                invoice_draft.change_party(session, self.projects[1], {"bill_to": self.projects[0]})
        self.change_price(price)
        for batch in batches:
            self.begin(*batch)

    # ---- batches

    @rule(price=PRICE)
    def change_price(self, price: int) -> None:
        row = {"input": 10**6, "cached_input": 2 * 10**6, "output": price * 10**6}
        for tier in ("batch_24h", "standard"):
            self.db.run(lambda s, tier=tier: price_book.set_price(s, "m", tier, row, None))

    @rule(which=CHOICE, high=HIGH, units=UNITS, cap=st.none() | AMOUNT, on_quota=ON_QUOTA)
    def another(self, which: int, high: int, units: int, cap: int | None, on_quota: str) -> None:
        self.begin(which, high, units, cap, on_quota)

    def begin(self, which: int, high: int, units: int, cap: int | None, on_quota: str) -> None:
        self.treasury.project_id = self.projects[which % 2]
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
            expires_ms=NEVER_MS,
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
            batch_id = live[which % len(live)]
            self.db.run(lambda s: service.cancel(s, self.project_of(batch_id), batch_id))

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

    @rule(
        which=CHOICE,
        kind=st.sampled_from(["topup", "payment", "refund", "credit"]),
        amount=AMOUNT,
        key=st.sampled_from("abcdef"),
        of_batch=st.none() | CHOICE,
    )
    def move(self, which: int, kind: Any, amount: int, key: str, of_batch: int | None = None) -> None:
        project = self.projects[which % 2]
        known = self.moved.get((project, kind, key))
        with self.db.reading() as session:
            left = queries.charged_nanos(session, project, None)
            mine = list(session.scalars(select(Batch.id).where(Batch.project_id == project).order_by(Batch.id)))
        batch_id = mine[of_batch % len(mine)] if mine and kind == "refund" and of_batch is not None else None

        def post(session: Any) -> movements.Moved:
            return movements.post(session, kind, project, amount, reason="r", key=key, batch_id=batch_id)

        try:
            moved = self.db.run(post)
        except MismatchError:
            assert known is not None
        except InvalidRequestError:
            assert kind == "refund" and known is None
        else:
            assert moved.is_new == (known is None) and known in (None, amount)
            assert kind != "refund" or known is not None or amount <= left
            self.moved[project, kind, key] = amount

    # ---- months

    @rule()
    def next_month(self) -> None:
        """The month ends, and is closed."""
        self.clock_ms = Month.of(self.clock_ms).end_ms + invoice_service.CLOSES_AFTER_MS

    @rule(which=CHOICE, months_ago=st.integers(1, 2))
    def bill(self, which: int, months_ago: int) -> None:
        month = Month.of(self.clock_ms)
        for _ in range(months_ago):
            month = Month.of(month.start_ms - 1)

        def issue(session: Any) -> None:
            made = invoice_draft.draft(session, SETTINGS, self.projects[which % 2], month)
            invoice_service.issue(session, made.id)

        with suppress(InvalidRequestError):  # it is billed, or on another one's invoice
            self.db.run(issue)

    @rule(which=CHOICE, action=st.sampled_from(["pay", "void", "dispute"]))
    def settle(self, which: int, action: Any) -> None:
        self.act(which, action, reason="r")

    @rule(which=CHOICE, cents=st.none() | st.integers(1, 3), key=st.sampled_from("abc"))
    def credit_note(self, which: int, cents: int | None, key: str) -> None:
        amount = None if cents is None else f"0.0{cents}"
        number = self.issued(which)
        known = self.notes.get(key)
        try:
            made = self.act(which, "credit_note", reason="r", amount=amount, key=key)
        except MismatchError:
            assert known is not None
            return
        if made is not None:
            assert known is None or (known[0] == number and made["corrects"] == number)
            self.notes.setdefault(key, (str(number), amount))

    def act(self, which: int, action: Any, **body: Any) -> dict[str, Any] | None:
        number = self.issued(which)
        if number is None:
            return None
        try:
            return self.db.run(lambda s: invoice_api.act(s, SETTINGS, number, action, Change(**body)))
        except MismatchError:
            raise
        except InvalidRequestError:
            return None

    def issued(self, which: int) -> str | None:
        with self.db.reading() as session:
            numbers = list(
                session.scalars(select(Invoice.number).where(Invoice.number.is_not(None)).order_by(Invoice.number))
            )
        return numbers[which % len(numbers)] if numbers else None

    def project_of(self, batch_id: str) -> str:
        with self.db.reading() as session:
            return session.get_one(Batch, batch_id).project_id

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

        found = Counter(dict(ask("SELECT account, SUM(amount_nanos) FROM ledger_entries GROUP BY account")))
        assert sum(found.values()) == 0
        assert not ask("SELECT 1 FROM ledger_entries GROUP BY transaction_id HAVING SUM(amount_nanos) <> 0")
        lines = [line for its, _ in self.parts.values() for line in its]
        assert len(lines) == len(set(lines)), "no line is billed twice"
        bill = sum(cost for _, cost in self.parts.values())
        refunds = sum(amount for (_, kind, _), amount in self.moved.items() if kind == "refund")
        ((notes,),) = ask("SELECT COALESCE(SUM(net_nanos), 0) FROM invoices WHERE corrects IS NOT NULL")
        assert found["revenue"] == bill - refunds + notes >= 0, "no more is given back than was charged"
        assert ask("SELECT COALESCE(SUM(cost_nanos), 0) FROM usage") == [(bill,)]
        assert {row[0] for row in ask("SELECT id FROM parts WHERE NOT is_void")} == self.parts.keys()
        held: Counter[str] = Counter()
        for batch_id, project, status, cost, reserved, most, granted in ask(
            "SELECT b.id, b.project_id, b.status, b.cost_nanos, b.reserved_nanos, b.max_cost_nanos, (SELECT"
            " COALESCE(SUM(MAX(0, u.granted_nanos - u.spent_nanos)), 0) FROM units u WHERE u.batch_id = b.id"
            " AND u.state = 'leased') FROM batches b"
        ):
            assert cost <= reserved, f"no reservation is negative: {batch_id}"
            assert most is None or reserved <= most, "overshoot 0"
            assert granted <= reserved - cost, "what is granted is there"
            held[project] += reserved - cost if status not in TERMINAL else 0
        for project in self.projects:
            self.project_is_right(project, found, held[project])
        for number, payable, left in ask(
            "SELECT i.number, i.payable_nanos, i.payable_nanos + (SELECT COALESCE(SUM(n.payable_nanos), 0)"
            " FROM invoices n WHERE n.corrects = i.number) FROM invoices i WHERE i.kind = 'invoice'"
        ):
            assert left >= 0 or payable < 0, f"more was credited than {number} says"

    def project_is_right(self, project: str, found: Counter[str], held: int) -> None:
        available = found[f"available:{project}"]
        assert found[f"reserved:{project}"] == held
        with self.db.reading() as session:
            funds = queries.funds(session, project)
        assert (funds.available_nanos, funds.reserved_nanos) == (available, held), "the triggers have added it up"
        budget = self.budgets.get(project)
        assert budget is None or limits.charged_nanos(funds, self.clock_ms) + held <= budget
        paid = project in self.prepaid and not self.has_taxes
        assert not paid or available >= 0

    @property
    def has_taxes(self) -> bool:
        """Tax is taken from a prepaid balance when a month is billed, whether there is as much or not."""
        return self.db.raw.execute("SELECT 1 FROM invoices WHERE number IS NOT NULL").fetchone() is not None

    def teardown(self) -> None:
        for batch_id in self.live():
            with suppress(InvalidRequestError):
                self.db.run(lambda s, batch_id=batch_id: service.cancel(s, self.project_of(batch_id), batch_id))
        with self.db.transaction() as session:
            for unit in session.scalars(select(Unit).where(Unit.state == "leased")):
                unit.state = "ready"
            for batch in session.scalars(select(Batch).where(Batch.status == Status.FINALIZING)):
                batch.expires_ms = batch.finalizing_ms = 1
        for batch_id in self.live():
            self.finalize_batch(batch_id, None)
        assert self.live() == []
        self.books_are_right()
        report = Report()
        reader: Any = SimpleNamespace(snapshot=self.snapshot)
        compare_books(reader, report)
        compare_invoices(reader, report)
        assert [str(difference) for difference in report.differences] == []

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """What the audit reads."""
        with self.db.engine.connect() as connection:
            yield Snapshot(connection)
            connection.rollback()

    def told(self) -> set[str]:
        """The kinds of postings that there are."""
        with self.db.reading() as session:
            return set(session.scalars(select(LedgerTransaction.kind)))


@lru_cache(maxsize=1)
def _working_database() -> MemoryDatabase:
    """The one that all histories use, one after the other: its statements are compiled once."""
    return MemoryDatabase()


def run_money(machine: type[Money], examples: int, steps: int) -> None:
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
