"""Wire shapes of prices, movements and balances."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from batchsvc.accounts.tables import Project
from batchsvc.billing import limits
from batchsvc.billing.limits import Funds, Limits
from batchsvc.billing.movements import Moved
from batchsvc.errors import InvalidRequestError
from batchsvc.money import format_dollars, parse_dollars


class _Effective(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    from_: str | None = Field(default=None, alias="from")


class ImportPrices(_Effective):
    """Body of a new price book; without a `version` it is the next one, without `from` it is in force now."""

    version: int | None = None
    unit: str | None = None  # as in a book that was exported; there is one unit
    models: dict[str, dict[str, dict[str, Any]]]

    def book(self) -> dict[str, Any]:
        """The book itself."""
        return self.model_dump(include={"version", "models"}, exclude_none=True)


class SetPrice(_Effective):
    """Body of a change to one row of the price book, in nano-dollars per million tokens."""

    model: str
    tier: str
    input: int
    cached_input: int
    output: int

    def row(self) -> dict[str, int]:
        """The rates."""
        return {"input": self.input, "cached_input": self.cached_input, "output": self.output}


class PostMovement(BaseModel):
    """Body of a top-up, payment, refund or credit. `amount` is in dollars; `key` tells a repeated call from another."""

    model_config = ConfigDict(extra="forbid", strict=True)

    amount: StrictInt | StrictFloat | StrictStr
    reason: str
    key: str
    batch_id: str | None = None

    def amount_nanos(self) -> int:
        """The amount. Raises InvalidRequestError."""
        nanos = parse_dollars(self.amount)
        if nanos is None or nanos <= 0:
            raise InvalidRequestError(
                'amount: it must be dollars above 0, such as "12.50", exact to a nano-dollar.',
                code="invalid_amount",
                param="amount",
            )
        return nanos


def movement_object(moved: Moved) -> dict[str, Any]:
    """A movement as it is stored; `is_new` is false for one that was stored before."""
    row = moved.row
    return {
        "id": f"ledger_{row.id}",
        "object": "ledger.movement",
        "kind": row.kind,
        "project_id": row.project_id,
        "batch_id": row.batch_id,
        "amount_nanos": moved.amount_nanos,
        "amount": format_dollars(moved.amount_nanos),
        "corrects": moved.corrects,
        "reason": row.reason,
        "key": row.key.removeprefix(f"{row.kind}:{row.project_id}:"),
        "created_at": row.created_ms // 1000,
        "is_new": moved.is_new,
        "available_nanos": moved.available_nanos,
    }


def balance_object(project: Project, funds: Funds, now_ms: int, held_nanos: int) -> dict[str, Any]:
    """What a project has, holds and may spend now; `room_nanos` is null without a limit. `held_nanos`: by calls."""
    found = Limits(budget_nanos=project.budget_nanos, is_prepaid=project.is_prepaid)
    room = limits.room_nanos(found, funds, now_ms)
    return {
        "object": "balance",
        "project_id": project.id,
        "available_nanos": funds.available_nanos,
        "reserved_nanos": funds.reserved_nanos,
        "month_nanos": limits.charged_nanos(funds, now_ms),
        "budget_nanos": project.budget_nanos,
        "is_prepaid": project.is_prepaid,
        "room_nanos": None if room is None else max(0, room - held_nanos),
    }
