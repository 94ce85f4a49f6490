"""Budgets in SQL: what a batch reserves, who waits for money, and that nobody overspends together."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import func, select

from batchsvc.accounts import administration
from batchsvc.accounts import service as accounts
from batchsvc.audit.actor import at_command_line
from batchsvc.batches import budget_queries, finalize_queries, plan_queries, service, unit_queries
from batchsvc.batches.budget_queries import Grant, Verdict
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Unit
from batchsvc.batches.unit_queries import ClaimedUnit, NewPart
from batchsvc.billing import queries as ledger
from batchsvc.billing import service as billing
from batchsvc.billing.limits import Funds
from batchsvc.billing.tables import LedgerEntry
from batchsvc.clock import now_ms
from batchsvc.db.session import Database

DIGEST = "d" * 64


class Treasury:
    """A project with limits, batches whose planning ends here, and workers that spend on them."""

    def __init__(self, db: Database) -> None:
        self.db = db
        with self.db.transaction() as session:
            self.project_id = accounts.create_project(session, "p").id
        self._numbers = itertools.count(1)
        self._keys = itertools.count(1)

    def limit(self, **changes: Any) -> None:
        self.db.run(lambda s: administration.change_project(s, at_command_line(), self.project_id, changes))

    def topup(self, nanos: int) -> None:
        key = f"k{next(self._keys)}"
        self.db.run(lambda s: billing.post_topup(s, self.project_id, nanos, reason="r", key=key))

    def add(self, **values: Any) -> str:
        number = next(self._numbers)
        row = {
            "id": f"batch_{number}",
            "project_id": self.project_id,
            "api_key_id": "key",
            "endpoint": "/v1/chat/completions",
            "input_file_id": "file-x",
            "completion_window": "24h",
            "tier": "batch_24h",
            "status": Status.VALIDATING,
            "created_ms": number,
            "expires_ms": now_ms() + 3_600_000,
            "price_version": 1,
            "plan_epoch": 1,
            "model_digest": DIGEST,
            "model_id": "m",
            "rates": {},
        }
        with self.db.transaction() as session:
            session.add(Batch(**(row | values)))
        return f"batch_{number}"

    def plan(self, batch_id: str, high: int, *, units: int = 1, lines: int = 4) -> str:
        """End its planning: it will probably cost `high`. What it waits for, or its status."""
        made = [
            plan_queries.NewUnit(no=no, s3_key=f"{batch_id}/{no}", sha256="x", num_lines=lines, est_tokens=1)
            for no in range(units)
        ]
        window = plan_queries.NewWindow(
            first_line=1,
            last_line=units * lines,
            num_lines=units * lines,
            next_offset=1,
            input_tokens=1,
            line_nos_key=f"{batch_id}/lines",
            line_nos_sha256="x",
            reserve_nanos=2 * high,
            high_nanos=high,
            units=made,
            keeps_lease=True,
        )
        assert self.db.run(lambda s: plan_queries.add_window(s, batch_id, 1, 0, window, max_problems=9))
        assert self.db.run(lambda s: plan_queries.start(s, batch_id, 1))
        return self.says(batch_id)

    def begin(self, high: int, *, units: int = 1, lines: int = 4, **values: Any) -> str:
        return self.plan(self.add(**values), high, units=units, lines=lines)

    def says(self, batch_id: str) -> str:
        shown = self.show(batch_id)
        return str(shown["waiting_for"] if shown["waiting_for"] == "budget" else shown["status"])

    def show(self, batch_id: str) -> dict[str, Any]:
        with self.db.reading() as session:
            return service.show(session, [session.get_one(Batch, batch_id)], renew_s=1)[0]

    def claim(self, limit: int = 1) -> list[ClaimedUnit]:
        return self.db.run(lambda s: unit_queries.claim(s, DIGEST, "w", 60, limit))

    def grant(self, unit: ClaimedUnit, want: int, **more: int) -> Grant | None:
        return self.db.run(lambda s: budget_queries.grant(s, unit.id, unit.epoch, want_nanos=want, **more))

    def hold(self, nanos: int) -> None:
        """A call runs that may cost so much."""
        expires_ms = now_ms() + 600_000
        self.db.run(lambda s: ledger.insert_hold(s, "call", self.project_id, nanos, expires_ms))

    def hang_up(self) -> None:
        """It has ended, for nothing."""
        self.db.run(lambda s: ledger.drop_hold(s, "call"))

    def part(self, unit: ClaimedUnit, bits: list[int], cost: int, *, over: int = 0) -> bool:
        part_id = f"part{next(self._keys)}"
        part = NewPart(
            id=part_id,
            s3_key=part_id,
            sha256="x",
            size_bytes=1,
            bitmap=bytes([sum(1 << bit for bit in bits)]),
            lines_ok=len(bits) - over,
            lines_err=over,
            input_tokens=1,
            cached_tokens=0,
            output_tokens=1,
            cost_nanos=cost,
            standard_nanos=cost,
            over_budget=over,
        )
        return self.db.run(lambda s: unit_queries.commit_part(s, unit.id, unit.epoch, part))

    def finish(self, batch_id: str) -> None:
        lease = self.db.run(lambda s: finalize_queries.begin(s, batch_id, "f", 60))
        assert lease is not None
        ended = {"completed": 0, "failed": 0, "file_ttl_s": 10}
        assert self.db.run(lambda s: finalize_queries.publish(s, batch_id, lease.epoch, [], **ended))

    def admit(self) -> list[str]:
        with self.db.reading() as session:
            waiting = budget_queries.waiting(session)
        admitted = []
        for batch_id in itertools.chain.from_iterable(waiting.values()):
            if not self.db.run(lambda s, batch_id=batch_id: budget_queries.admit(s, batch_id)):
                break
            admitted.append(batch_id)
        return admitted

    def batch(self, batch_id: str) -> Batch:
        with self.db.reading() as session:
            return session.get_one(Batch, batch_id)

    def funds(self) -> Funds:
        with self.db.reading() as session:
            return ledger.funds(session, self.project_id)

    def balance(self) -> dict[str, int]:
        with self.db.reading() as session:
            summed = select(LedgerEntry.account, func.sum(LedgerEntry.amount_nanos)).group_by(LedgerEntry.account)
            return {row[0].partition(":")[0]: int(row[1]) for row in session.execute(summed)}


@pytest.fixture
def treasury(migrated_url: str) -> Iterator[Treasury]:
    made = Treasury(Database(migrated_url))
    yield made
    made.db.dispose()


def test_a_batch_reserves_what_it_will_probably_cost_and_never_more_than_its_max_cost(treasury: Treasury) -> None:
    assert treasury.begin(100) == treasury.begin(100, max_cost_nanos=60) == "in_progress"
    assert [treasury.batch(f"batch_{no}").reserved_nanos for no in (1, 2)] == [100, 60]
    assert treasury.balance() == {"available": -160, "reserved": 160}
    assert treasury.show("batch_2")["max_cost_nanos"] == 60


def test_without_limits_a_reservation_follows_the_cost(treasury: Treasury) -> None:
    treasury.begin(100)
    (unit,) = treasury.claim()
    assert not unit.is_metered
    assert treasury.part(unit, [0], 70) and treasury.part(unit, [1], 50)
    assert treasury.balance() == {"available": -120, "reserved": 0, "revenue": 120}
    assert treasury.part(unit, [2, 3], 1)
    treasury.finish("batch_1")
    assert treasury.balance() == {"available": -121, "reserved": 0, "revenue": 121}


def test_a_grant_is_never_more_than_max_cost_leaves(treasury: Treasury) -> None:
    treasury.begin(50, units=2, max_cost_nanos=90)
    first, second = treasury.claim(2)
    assert first.is_metered and second.is_metered
    assert treasury.grant(first, 60) == (60, Verdict.FITS), "the reservation is extended"
    assert treasury.grant(second, 60) == (30, Verdict.FITS)
    assert treasury.grant(second, 60, need_nanos=60) == (0, Verdict.LATER), "the first unit may need less than it has"
    assert treasury.grant(first, 60) == (60, Verdict.FITS), "asking again changes nothing"
    assert treasury.part(first, [0, 1, 2, 3], 35)
    assert treasury.grant(second, 60, need_nanos=60) == (0, Verdict.OVER)
    assert treasury.grant(second, 55, need_nanos=55) == (55, Verdict.FITS)
    assert treasury.part(second, [0], 55)
    assert treasury.grant(second, 100, used_nanos=55, need_nanos=56) == (55, Verdict.OVER)
    assert treasury.part(second, [1, 2, 3], 0, over=3)
    treasury.finish("batch_1")
    shown = treasury.show("batch_1")
    assert (shown["usage"]["cost_nanos"], shown["lines_over_budget"]) == (90, 3)
    assert treasury.balance() == {"available": -90, "reserved": 0, "revenue": 90}


def test_a_grant_is_void_with_its_lease(treasury: Treasury) -> None:
    treasury.begin(50, units=2, max_cost_nanos=50)
    (unit,) = treasury.claim()
    assert treasury.grant(unit, 50) == (50, Verdict.FITS)
    with treasury.db.transaction() as session:
        session.get_one(Unit, unit.id).lease_ms = 0
    assert treasury.db.run(unit_queries.free_expired) == 1
    assert treasury.grant(unit, 50) is None
    assert not treasury.part(unit, [0], 50), "whoever lost it can't spend it"
    again = treasury.claim(2)
    assert len(again) == 2
    assert [treasury.grant(each, 50) for each in again] == [(50, Verdict.FITS), (0, Verdict.FITS)]


def test_a_batch_waits_for_the_monthly_budget_in_the_order_of_age(treasury: Treasury) -> None:
    treasury.limit(budget_nanos=100)
    assert treasury.begin(60) == "in_progress"
    assert treasury.begin(60) == "budget"
    assert treasury.begin(30) == "budget", "it would fit, and comes after the one that waits"
    assert len(treasury.claim(9)) == 1, "what waits isn't run"
    assert treasury.admit() == []
    with treasury.db.transaction() as session:
        unit = session.scalars(select(Unit).where(Unit.batch_id == "batch_1")).one()
        unit.state = "done"
    treasury.finish("batch_1")  # it cost nothing, and gives all back
    assert treasury.admit() == ["batch_2", "batch_3"]
    assert treasury.funds().reserved_nanos == 90


def test_what_can_never_fit_or_will_not_wait_fails(treasury: Treasury) -> None:
    treasury.limit(budget_nanos=100)
    assert treasury.begin(101) == "failed"
    (error,) = treasury.show("batch_1")["errors"]["data"]
    assert error["code"] == "budget_exceeded" and "max_cost" in error["message"]
    assert treasury.begin(101, max_cost_nanos=80) == "in_progress"
    assert treasury.begin(30, on_quota="fail") == "failed"
    assert treasury.batch("batch_3").reserved_nanos == 0
    assert treasury.funds().reserved_nanos == 80


def test_a_prepaid_project_spends_what_was_topped_up(treasury: Treasury) -> None:
    treasury.limit(is_prepaid=True)
    assert treasury.begin(50) == "budget"
    treasury.topup(49)
    assert treasury.admit() == []
    treasury.topup(11)
    assert treasury.admit() == ["batch_1"]
    (unit,) = treasury.claim()
    assert treasury.grant(unit, 80) == (60, Verdict.FITS), "10 more than it had reserved: all there is"
    assert treasury.part(unit, [0], 55)
    assert treasury.grant(unit, 80, used_nanos=55, need_nanos=65) == (55, Verdict.WAIT)
    assert treasury.says("batch_1") == "budget"
    assert treasury.db.run(lambda s: unit_queries.release(s, unit.id, unit.epoch))
    assert treasury.claim() == []
    treasury.topup(4)
    assert treasury.admit() == [], "it holds 5 and wants 10"
    treasury.topup(101)
    assert treasury.admit() == ["batch_1"]
    (unit,) = treasury.claim()
    assert treasury.grant(unit, 30) == (30, Verdict.FITS)
    assert treasury.part(unit, [1, 2, 3], 20)
    treasury.finish("batch_1")
    assert treasury.funds().available_nanos == 49 + 11 + 4 + 101 - 75 and treasury.funds().reserved_nanos == 0


def test_money_that_comes_lifts_no_batch_over_its_max_cost(treasury: Treasury) -> None:
    treasury.limit(is_prepaid=True)
    treasury.topup(90)
    treasury.begin(90, units=3, max_cost_nanos=100)
    first, second, third = treasury.claim(3)
    assert treasury.grant(first, 90) == (90, Verdict.FITS)
    assert treasury.part(first, [0, 1, 2, 3], 90)
    assert treasury.grant(second, 8, need_nanos=8) == (0, Verdict.WAIT)
    treasury.topup(100)
    assert treasury.grant(third, 9) == (9, Verdict.FITS)
    assert treasury.admit() == ["batch_1"]
    assert treasury.batch("batch_1").reserved_nanos == 100
    assert treasury.grant(second, 8, need_nanos=8) == (0, Verdict.LATER)


def test_a_limit_that_comes_late_binds_the_next_claim(treasury: Treasury) -> None:
    treasury.begin(50, units=2)
    (unit,) = treasury.claim()
    treasury.limit(budget_nanos=70)
    (later,) = treasury.claim()
    assert (unit.is_metered, later.is_metered) == (False, True)
    assert treasury.part(unit, [0, 1, 2, 3], 40)
    assert treasury.grant(later, 100) == (30, Verdict.FITS)


def test_a_batch_that_will_not_wait_ends_its_lines(treasury: Treasury) -> None:
    treasury.limit(budget_nanos=50)
    treasury.begin(50, on_quota="fail")
    (unit,) = treasury.claim()
    assert treasury.grant(unit, 80, need_nanos=60) == (0, Verdict.OVER)
    assert treasury.says("batch_1") == "in_progress"


def test_a_limit_that_is_taken_back_while_units_run_binds_them_no_more(treasury: Treasury) -> None:
    treasury.limit(budget_nanos=100)
    treasury.begin(100)
    (unit,) = treasury.claim()
    assert treasury.grant(unit, 300) == Grant(100, Verdict.FITS)
    treasury.limit(budget_nanos=None)
    assert treasury.grant(unit, 300, used_nanos=90, need_nanos=190) == Grant(300, Verdict.FITS)


def test_a_limit_that_is_set_while_units_run_is_told_to_whoever_runs_them(treasury: Treasury) -> None:
    treasury.begin(100, units=2)
    treasury.claim()

    def stopping() -> list[str]:
        with treasury.db.reading() as session:
            return unit_queries.stopping(session, "w")

    assert stopping() == []
    treasury.limit(budget_nanos=100)
    (told,) = stopping()
    (metered,) = treasury.claim()
    treasury.grant(metered, 10)
    assert stopping() == [told], "who has asked for money goes on"


def test_batches_that_begin_at_once_share_one_budget(treasury: Treasury) -> None:
    treasury.limit(budget_nanos=100)
    batches = [treasury.add() for _ in range(6)]
    together = threading.Barrier(len(batches))

    def begin(batch_id: str) -> None:
        together.wait()
        treasury.plan(batch_id, 40)

    _run([threading.Thread(target=begin, args=(batch_id,)) for batch_id in batches])
    assert sorted(treasury.says(batch_id) for batch_id in batches) == ["budget"] * 4 + ["in_progress"] * 2
    assert treasury.funds().reserved_nanos == 80


def test_parallel_workers_of_parallel_batches_never_overspend_together(treasury: Treasury) -> None:
    """Four workers on three batches of a prepaid project whose lines could cost far more than there is."""
    treasury.limit(is_prepaid=True)
    treasury.topup(1_000)
    for _ in range(3):
        treasury.begin(100, units=3, max_cost_nanos=600, on_quota="fail")
    lowest = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        while units := treasury.claim():
            for unit in units:
                granted = (treasury.grant(unit, 4 * 90) or Grant(0, Verdict.FITS)).granted_nanos
                for bit in range(4):
                    fits = granted >= 90
                    cost = chance.randint(1, 90) if fits else 0
                    granted -= cost
                    assert treasury.part(unit, [bit], cost, over=0 if fits else 1)
                lowest.append(treasury.funds().available_nanos)

    _run([threading.Thread(target=work, args=(seed,)) for seed in range(4)])
    for no in (1, 2, 3):
        assert treasury.batch(f"batch_{no}").cost_nanos <= 600
        treasury.finish(f"batch_{no}")
    found = treasury.balance()
    assert min(lowest) >= 0 and len(lowest) == 9
    assert found["available"] == 1_000 - found["revenue"] >= 0 and found["reserved"] == 0
    assert sum(found.values()) == 0
    assert found["revenue"] >= 3, "what each batch has reserved is enough for its first line"


def _run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_batch_that_would_not_wait_for_money_waits_for_calls_that_hold_it(treasury: Treasury) -> None:
    treasury.limit(budget_nanos=100)
    treasury.hold(80)
    assert treasury.begin(101, on_quota="fail") == "failed"
    assert treasury.begin(50, on_quota="fail") == "budget"
    assert treasury.admit() == []
    treasury.hang_up()
    assert treasury.admit() == ["batch_2"] and treasury.batch("batch_2").reserved_nanos == 50


def test_when_calls_have_spent_it_the_lines_of_such_a_batch_are_told_so(treasury: Treasury) -> None:
    treasury.limit(budget_nanos=100)
    treasury.hold(80)
    assert treasury.begin(50, on_quota="fail") == "budget"
    treasury.hang_up()
    treasury.limit(budget_nanos=20)
    assert treasury.admit() == ["batch_1"], "there is nothing to wait for"
    (unit,) = treasury.claim()
    assert treasury.grant(unit, 50, need_nanos=50) == Grant(0, Verdict.OVER)


def test_no_grant_is_refused_for_good_because_of_a_call_that_runs(treasury: Treasury) -> None:
    treasury.limit(budget_nanos=100)
    treasury.begin(20, on_quota="fail")
    (unit,) = treasury.claim()
    treasury.hold(70)
    assert treasury.grant(unit, 200, need_nanos=200) == Grant(0, Verdict.OVER), "all of the budget isn't enough"
    assert treasury.grant(unit, 60, need_nanos=60) == Grant(0, Verdict.WAIT)
    assert treasury.says("batch_1") == "budget" and treasury.admit() == []
    treasury.hang_up()
    assert treasury.admit() == ["batch_1"]
