"""Each guard of the money is missed: without it, a history that is written down here makes the books wrong.

Nothing is searched for: the same history is right with the guard and wrong without, so a mutant always has a verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from batchsvc.batches import budget_queries
from batchsvc.billing import correction_queries, invoice_queries, queries, service
from tests.workers.money_model import Money

CENT = 10**7
LIMITS: Any = ((None, None), (None, None))


def used(machine: Money, **limits: Any) -> None:
    """A batch of three lines has run, for a cent each and a little."""
    machine.open(
        limits=limits.get("limits", LIMITS), pays_for_other=False, price=CENT, batches=[(0, 20, 1, None, "wait")]
    )
    machine.work(which=0, lines=3, output=1, cached=0)


def billed(machine: Money) -> None:
    used(machine)
    machine.next_month()
    machine.bill(0, 1)


def refund_then_credit_note(machine: Money) -> None:
    billed(machine)
    machine.move(0, "refund", 3 * CENT, "a", 0)
    machine.credit_note(0, None, "a")
    machine.credit_note(0, 3, "b")


def credit_note_then_refund(machine: Money) -> None:
    billed(machine)
    machine.credit_note(0, None, "a")
    machine.move(0, "refund", 3 * CENT, "a", 0)
    machine.move(0, "refund", CENT, "b")


def damaged(machine: Money) -> None:
    used(machine)
    machine.work(which=0, lines=1, output=0, cached=0)
    machine.finalize(which=0, damaged=0)


def side_by_side(machine: Money) -> None:
    """Two units of one batch that has money for one of them."""
    machine.open(limits=LIMITS, pays_for_other=False, price=CENT, batches=[(0, 20, 2, 13 * CENT, "wait")])
    for _ in range(2):
        for which in (0, 1):
            if which < len(machine.holders):
                machine.work(which=which, lines=1, output=0, cached=0)
            machine.check()


def over_budget(machine: Money) -> None:
    used(machine, limits=((4 * CENT, None), (None, None)))
    machine.begin(0, 2 * CENT, 1, None, "fail")


def twice_in_a_month(machine: Money) -> None:
    billed(machine)
    machine.bill(0, 1)


def goodwill(machine: Money) -> None:
    used(machine)
    machine.move(0, "credit", CENT, "a")
    machine.next_month()
    machine.bill(0, 1)


def no_usage(session: Any, batch: Any, part: Any, **_: Any) -> bool:
    from batchsvc.billing import ledger

    posting = ledger.void(batch.project_id, batch.id, part.id, part.cost_nanos)
    return queries.insert_posting(session, posting, price_version=1, created_ms=part.created_ms)


@dataclass(frozen=True)
class Mutant:
    """What a history needs, and what takes its place."""

    history: Callable[[Money], None]
    without: dict[tuple[Any, str], Callable[..., Any]] = field(default_factory=dict)


MUTANTS = {
    "credit notes see refunds": Mutant(
        refund_then_credit_note, {(correction_queries, "given_back_nanos"): lambda *_: 0}
    ),
    "refunds see credit notes": Mutant(
        credit_note_then_refund, {(correction_queries, "left_nanos"): lambda *_: 10**18}
    ),
    "what is damaged is taken back from usage too": Mutant(damaged, {(service, "post_void"): no_usage}),
    "costs are covered": Mutant(used, {(budget_queries, "cover"): lambda *_: None}),
    "units share what a batch has": Mutant(side_by_side, {(budget_queries, "_outstanding"): lambda *_: 0}),
    "budgets bind": Mutant(over_budget, {(service, "room_nanos"): lambda *_: None}),
    "a month is billed once": Mutant(
        twice_in_a_month, {(invoice_queries, "claim"): lambda *_: None, (invoice_queries, "billed"): lambda *_: {}}
    ),
    "goodwill lowers the invoice": Mutant(goodwill, {(invoice_queries, "given_back"): lambda *_: []}),
}


def run(template: Path, history: Callable[[Money], None]) -> None:
    machine = type("Fixed", (Money,), {"template": template})()
    history(machine)
    machine.check()
    machine.teardown()


@pytest.mark.parametrize("guard", MUTANTS)
def test_each_guard_is_missed(migrated_sqlite: Path, monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    mutant = MUTANTS[guard]
    run(migrated_sqlite, mutant.history)  # with the guard all is well
    for (module, name), without in mutant.without.items():
        monkeypatch.setattr(module, name, without)
    with pytest.raises(AssertionError):
        run(migrated_sqlite, mutant.history)
