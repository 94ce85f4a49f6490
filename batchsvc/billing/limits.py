"""How much a project may still spend, by its monthly budget and its prepaid balance. Pure.

What batches hold in `reserved` counts as spent until it is released: that is why batches that run side by side can't
overspend together.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchsvc.billing.month import Month


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an operator has set for a project. `budget_nanos` is for a calendar month in UTC; None: no budget."""

    budget_nanos: int | None = None
    is_prepaid: bool = False

    @property
    def is_none(self) -> bool:
        return self.budget_nanos is None and not self.is_prepaid


@dataclass(frozen=True, slots=True, kw_only=True)
class Funds:
    """What the ledger says of a project; see the table `balances`."""

    available_nanos: int = 0
    reserved_nanos: int = 0
    month: int = 0
    month_nanos: int = 0


def month_no(ms: int) -> int:
    """The UTC month of a time as one number, as `balances.month` has it."""
    month = Month.of(ms)
    return month.year * 12 + month.month - 1


def charged_nanos(funds: Funds, now_ms: int) -> int:
    """What was charged this month."""
    return funds.month_nanos if funds.month == month_no(now_ms) else 0


def room_nanos(limits: Limits, funds: Funds, now_ms: int) -> int | None:
    """What may be reserved now, at least 0. None: as much as one likes."""
    rooms = []
    if limits.budget_nanos is not None:
        rooms.append(limits.budget_nanos - charged_nanos(funds, now_ms) - funds.reserved_nanos)
    if limits.is_prepaid:
        rooms.append(funds.available_nanos)
    return max(0, min(rooms)) if rooms else None
