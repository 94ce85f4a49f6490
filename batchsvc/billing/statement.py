"""A project's account over a month: opening, every movement, closing; and that they add up.

The balance is what the project has with us: what was topped up and credited, less what was used, taxed and not yet
paid. It is below 0 while the project owes something. Reservations and invoices move money between its own accounts
and so don't change it; tax and rounding do.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.billing import statement_queries as queries
from batchsvc.billing.month import Month
from batchsvc.billing.statement_queries import Movement


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """`closing_nanos` is read from the ledger, not computed from the rest."""

    project_id: str
    project_name: str
    month: Month
    opening_nanos: int
    movements: tuple[Movement, ...]
    closing_nanos: int

    def __post_init__(self) -> None:
        moved = sum(movement.amount_nanos for movement in self.movements)
        assert self.opening_nanos + moved == self.closing_nanos, "a statement adds up: both are sums of one ledger"


def statement(session: Session, project: str, month: Month) -> Statement:
    """The statement of a project, given by id or name; of the month that is running, as far as it has come."""
    row = accounts.existing_project(session, project)
    return Statement(
        project_id=row.id,
        project_name=row.name,
        month=month,
        opening_nanos=queries.balance_before(session, row.id, month.start_ms),
        movements=tuple(queries.movements(session, row.id, month)),
        closing_nanos=queries.balance_before(session, row.id, month.end_ms),
    )
