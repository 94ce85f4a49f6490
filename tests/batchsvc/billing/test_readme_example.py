"""README's worked example is what the code does; and a bill of ten million lines is exactly their sum."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np

from batchsvc.billing import ledger
from batchsvc.money import Rates, line_cost_nanos

README = Path(__file__).parents[3] / "README.md"


def test_the_worked_example_of_readme() -> None:
    section = README.read_text(encoding="utf-8").split("\n## Money\n", 1)[1].split("\n## ", 1)[0]
    example = doctest.DocTestParser().get_doctest(section, {}, "README.md", str(README), 0)
    assert len(example.examples) >= 5
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


def test_ten_million_lines_of_one_token_drift_by_nothing() -> None:
    """Odd rates, so that each line is rounded: part by part, the sums are those of the lines, to the nano-dollar."""
    lines, part_lines = 10_000_000, 512
    rates = Rates(input=1_499_999, cached_input=500_000, output=333_333)
    shapes = [(1, 0, 1), (1, 1, 1), (1, 0, 0), (1, 1, 0)]  # input, cached, output tokens
    costs = [line_cost_nanos(rates, input_tokens=i, cached_tokens=c, output_tokens=o) for i, c, o in shapes]
    assert len(set(costs)) > 1, "they are told apart"
    shape = np.random.default_rng(7).integers(0, len(shapes), lines)
    by_line = np.array(costs)[shape]
    parts = np.add.reduceat(by_line, np.arange(0, lines, part_lines))
    accounts: dict[str, int] = {}
    reservation = 2 * lines
    postings = [ledger.reserve("p", "b", reservation)]
    postings += [ledger.part("p", "b", f"part{no}", int(cost)) for no, cost in enumerate(parts)]
    for posting in postings:
        for account, amount in posting.entries():
            accounts[account] = accounts.get(account, 0) + amount
    bill = sum(int(count) * cost for count, cost in zip(np.bincount(shape), costs, strict=True))
    assert accounts == {
        ledger.available("p"): -reservation,
        ledger.reserved("p"): reservation - bill,
        ledger.REVENUE: bill,
    }
    assert sum(accounts.values()) == 0
