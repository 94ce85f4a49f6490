"""The books are right in every history that chance makes, and in one that has every kind of posting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.money_model import Money, run_money

KINDS = {"reserve", "extend", "part", "void", "release", "topup", "payment", "refund", "credit"}
OF_INVOICES = {"invoice", "tax", "rounding", "settlement", "credit_note", "unbill"}


def fixed(template: Path) -> Money:
    """A machine that is driven by hand."""
    return type("Fixed", (Money,), {"template": template})()


def test_a_history_with_every_kind_of_posting(migrated_sqlite: Path) -> None:
    """Step by step, by the rules that the random histories take: nothing here is left to chance."""
    machine = fixed(migrated_sqlite)
    machine.open(limits=((None, 10**9), (None, None)), pays_for_other=False, price=10**7, batches=[])
    machine.begin(0, 20, 1, None, "wait")
    machine.begin(1, 20, 1, None, "wait")
    steps = [
        *(lambda which=which: machine.work(which=which, lines=3, output=3, cached=1) for which in (0, 1)),  # extends
        *(lambda: machine.work(which=0, lines=1, output=0, cached=0) for _ in range(2)),  # lets the units go
        *(lambda which=which: machine.finalize(which=which, damaged=0) for which in (0, 1)),
        *(machine.claim for _ in range(2)),
        *(lambda which=which: machine.work(which=which, lines=1, output=1, cached=0) for which in (0, 1)),
        *(lambda kind=kind: machine.move(1, kind, 5, "a") for kind in ("topup", "payment", "refund", "credit") * 2),
        machine.next_month,
        lambda: machine.finalize(which=0, damaged=None),
        *(lambda which=which: machine.bill(which, 1) for which in (0, 1, 0)),
        *(lambda which=which: machine.credit_note(which, 1, "a") for which in (0, 1, 1, 0)),
        *(lambda which=which: machine.settle(which, "void") for which in (0, 1, 2)),
        lambda: machine.bill(1, 1),
        *(lambda which=which: machine.settle(which, "dispute") for which in (0, 1, 2, 3)),
        *(lambda which=which: machine.settle(which, "pay") for which in (0, 1, 2, 3)),
    ]
    machine.check()
    for step in steps:
        step()
        machine.check()
    told = machine.told()
    machine.teardown()
    assert told == KINDS | OF_INVOICES, (KINDS | OF_INVOICES) ^ told


def test_in_any_order_the_books_are_right(migrated_sqlite: Path) -> None:
    run_money(type("Some", (Money,), {"template": migrated_sqlite}), examples=5, steps=30)


@pytest.mark.slow
def test_in_many_orders_the_books_are_right(migrated_sqlite: Path) -> None:
    run_money(type("Many", (Money,), {"template": migrated_sqlite}), examples=200, steps=60)
