"""Notes what no single statement makes happen: a deadline that will be missed, a share of a limit that is spent.

Each is looked for now and then, as the state stands, and noted once under its key: a look that is missed, or made by
two processes at once, changes nothing. Nothing is looked for in projects where nobody listens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from batchsvc.accounts import service as accounts
from batchsvc.batches import service as batches
from batchsvc.batches.estimate import Habits
from batchsvc.batches.offpeak import Night
from batchsvc.billing import service as billing
from batchsvc.billing.month import Month
from batchsvc.db.session import Database, database_now_ms
from batchsvc.webhooks import queries
from batchsvc.webhooks.alerts import DEFAULT_PERCENTS, Spent, alerts
from batchsvc.webhooks.events import EventType

_ENDED_MS = 3_600_000  # a batch that has ended is looked at for as long


class Notice(NamedTuple):
    """An event to be noted."""

    project_id: str
    event_type: EventType
    data: dict[str, Any]
    key: str


def note(db: Database, night: Night, habits: Habits) -> int:
    """Note what is new. Returns how much; writes nothing when there is nothing."""
    with db.reading() as session:
        found = [*_at_risk(session, night, habits), *_spent(session)]
        known = queries.known_keys(session, [notice.key for notice in found]) if found else set()
    new = [notice for notice in found if notice.key not in known]
    return db.run(partial(_add, notices=new)) if new else 0


def _add(session: Session, notices: Iterable[Notice]) -> int:
    return sum(queries.add_event(session, *notice) for notice in notices)


def _at_risk(session: Session, night: Night, habits: Habits) -> Iterator[Notice]:
    projects = queries.listening(session, EventType.AT_RISK)
    if projects:
        for batch in batches.at_risk(session, projects, night, habits):
            yield Notice(batch.project_id, EventType.AT_RISK, {"id": batch.id}, f"at_risk:{batch.id}")


def _spent(session: Session) -> Iterator[Notice]:
    projects = queries.listening(session, EventType.SPEND_ALERT)
    if not projects:
        return
    percents = accounts.alert_percents(session, projects)
    for spent in _limits(session, projects):
        wanted = percents.get(spent.project_id)
        for alert in alerts(spent, DEFAULT_PERCENTS if wanted is None else wanted):
            yield Notice(alert.project_id, EventType.SPEND_ALERT, alert.data, alert.key)


def _limits(session: Session, projects: set[str]) -> Iterator[Spent]:
    for found in billing.month_spending(session, projects):
        yield Spent(
            project_id=found.project_id,
            subject=found.project_id,
            limit=found.limit,
            month=str(Month(found.month // 12, found.month % 12 + 1)),
            spent_nanos=found.spent_nanos,
            limit_nanos=found.limit_nanos,
        )
    for batch in batches.capped(session, projects, database_now_ms(session) - _ENDED_MS):
        yield Spent(
            project_id=batch.project_id,
            subject=batch.id,
            limit="max_cost",
            month=None,
            spent_nanos=batch.cost_nanos,
            limit_nanos=batch.max_cost_nanos or 0,
        )
