"""What a leased unit may spend: a line goes to the engine only if the most that it can cost fits what is left. Pure.

All amounts are those of one lease and only grow, but for what lines that ended didn't need after all. Rows that don't
fit are parked until others of the unit have ended, or more is granted. A row of several lines that are computed once
runs for as many of them as there is money for, if it can't run for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from batchsvc.batches.unit_queries import ClaimedUnit
from batchsvc.billing.pricing import most_nanos
from batchsvc.money import Rates
from workers.translate import OpenRow


class Ask(NamedTuple):
    """What a unit wants granted in all; and, if none of its lines runs, what those that ended have used and the least
    that it can go on with, else 0."""

    want_nanos: int
    used_nanos: int
    need_nanos: int


class Allowance:
    """The money of one unit under one lease. Whoever calls holds the lock of the unit's source."""

    def __init__(self, unit: ClaimedUnit, rows: Iterable[OpenRow]) -> None:
        self.granted_nanos = 0
        self.parked: dict[str, OpenRow] = {}
        self._rates = Rates(**unit.rates["tier"])
        self._most = {row.request_id: sum(self._costs(row)) for row in rows}
        self._running: set[str] = set()
        self._taken_nanos = 0  # by lines that ended, as they cost, and by running ones, as they may cost at most

    def admit(self, row: OpenRow) -> bool:
        """Let a row run, or park it."""
        if not self._fits(row.request_id):
            self.parked[row.request_id] = row
            return False
        self._running.add(row.request_id)
        self._taken_nanos += self._most[row.request_id]
        return True

    def ended(self, request_id: str, cost_nanos: int) -> None:
        """A row ended, or will be run by somebody else; it may have been parked."""
        self.parked.pop(request_id, None)
        if request_id in self._running:
            self._running.remove(request_id)
            self._taken_nanos -= self._most[request_id] - cost_nanos

    def split(self) -> tuple[OpenRow, OpenRow] | None:
        """Cut a parked row in two, if nothing runs and no whole row fits: the lines of it that do, which may run at
        once, and the rest, which stays parked. None: not even one line fits."""
        for row in [] if self._running else list(self.parked.values()):
            costs = self._costs(row)
            count = sum(self._taken_nanos + total <= self.granted_nanos for total in accumulate(costs))
            if not 0 < count < len(costs):
                continue
            first = replace(row, members=row.members[:count])
            rest = replace(row, request_id=f"{row.request_id}+{count}", members=row.members[count:])
            self._most |= {first.request_id: sum(costs[:count]), rest.request_id: sum(costs[count:])}
            del self.parked[row.request_id]
            self.parked[rest.request_id] = rest
            return first, rest
        return None

    def unpark(self) -> list[OpenRow]:
        """Rows that fit by now, each for itself."""
        rows = [row for row in self.parked.values() if self._fits(row.request_id)]
        for row in rows:
            del self.parked[row.request_id]
        return rows

    def ask(self, num_open: int) -> Ask:
        """What to ask for. `num_open`: rows of the unit that haven't ended."""
        most = [self._most[request_id] for request_id in self.parked]
        is_idle = bool(most) and len(most) == num_open
        first_lines = [self._costs(row)[0] for row in self.parked.values()] if is_idle else []
        used, least = (self._taken_nanos, self._taken_nanos + min(first_lines)) if is_idle else (0, 0)
        return Ask(want_nanos=self._taken_nanos + sum(most), used_nanos=used, need_nanos=least)

    def ask_for_all(self) -> Ask:
        """What to ask for before anything runs."""
        return Ask(want_nanos=sum(self._most.values()), used_nanos=0, need_nanos=0)

    def most_nanos(self, row: OpenRow) -> int:
        """The most that a row can cost."""
        return self._most[row.request_id]

    def _costs(self, row: OpenRow) -> list[int]:
        return most_of(self._rates, row)

    def _fits(self, request_id: str) -> bool:
        return self._taken_nanos + self._most[request_id] <= self.granted_nanos


def most_of(rates: Rates, row: OpenRow) -> list[int]:
    """The most that each of the lines which a row lacks can cost, in order."""
    return [
        most_nanos(
            rates,
            input_tokens=len(row.row.prompt_ids),
            planned_cached_tokens=row.row.cached_tokens(member),
            max_tokens=row.row.most_output_tokens,
        )
        for _, member in row.members
    ]
