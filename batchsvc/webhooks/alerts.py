"""Which shares of a limit are spent, and under which name each is told once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

DEFAULT_PERCENTS = (50, 80, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """How much of a limit is spent. `subject` is a project or a batch; `month` None: the limit isn't a month's."""

    project_id: str
    subject: str
    limit: str  # budget, prepaid or max_cost
    month: str | None
    spent_nanos: int
    limit_nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A share that is reached."""

    project_id: str
    key: str
    data: dict[str, Any]


def alerts(spent: Spent, percents: Sequence[int]) -> Iterator[Alert]:
    """The shares that are reached, each with the key under which it is told once (a month)."""
    if spent.limit_nanos <= 0:
        return
    for percent in sorted(set(percents)):
        if spent.spent_nanos * 100 < spent.limit_nanos * percent:
            return
        data: dict[str, Any] = {"id": spent.subject, "limit": spent.limit, "percent": percent}
        if spent.month is not None:
            data["month"] = spent.month
        yield Alert(
            project_id=spent.project_id,
            key=f"spent:{spent.subject}:{spent.limit}:{spent.month or ''}:{percent}",
            data=data | {"spent_nanos": spent.spent_nanos, "limit_nanos": spent.limit_nanos},
        )
