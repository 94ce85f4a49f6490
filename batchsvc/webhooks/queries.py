"""SQL of receivers, as the API reads and writes them, and of the outbox."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.db.insert import insert
from batchsvc.db.keyset import Cursor, page
from batchsvc.db.session import database_now_ms
from batchsvc.webhooks.tables import WebhookDelivery, WebhookEndpoint, WebhookEvent


def endpoint(session: Session, project_id: str, endpoint_id: str, *, is_locked: bool = False) -> WebhookEndpoint | None:
    """One receiver of a project, as it is now."""
    found = select(WebhookEndpoint).where(WebhookEndpoint.id == endpoint_id, WebhookEndpoint.project_id == project_id)
    if is_locked:
        found = found.with_for_update()
    return session.scalars(found.execution_options(populate_existing=True)).first()


def endpoints(
    session: Session, project_id: str, *, after: Cursor | None, limit: int, ascending: bool
) -> list[WebhookEndpoint]:
    """At most `limit` receivers of a project beyond `after`. Served by ix_webhook_endpoints_listing."""
    wanted = select(WebhookEndpoint).where(WebhookEndpoint.project_id == project_id)
    listed = page(wanted, WebhookEndpoint.created_ms, WebhookEndpoint.id, after, limit, ascending)
    return list(session.scalars(listed))


def num_endpoints(session: Session, project_id: str) -> int:
    """How many receivers a project has."""
    counted = select(func.count()).where(WebhookEndpoint.project_id == project_id)
    return session.scalar(counted) or 0


def delete_endpoint(session: Session, endpoint_id: str) -> None:
    """Delete a receiver, and what is on its way to it."""
    session.execute(delete(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id))
    session.execute(delete(WebhookEndpoint).where(WebhookEndpoint.id == endpoint_id))


def delivery(session: Session, endpoint_id: str, delivery_id: str) -> WebhookDelivery | None:
    """One delivery to a receiver."""
    found = select(WebhookDelivery).where(WebhookDelivery.id == delivery_id, WebhookDelivery.endpoint_id == endpoint_id)
    return session.scalars(found).first()


def deliveries(
    session: Session, endpoint_id: str, *, after: Cursor | None, limit: int, ascending: bool
) -> list[tuple[WebhookDelivery, WebhookEvent]]:
    """At most `limit` deliveries to a receiver beyond `after`, with their events."""
    wanted = select(WebhookDelivery).where(WebhookDelivery.endpoint_id == endpoint_id)
    listed = page(wanted, WebhookDelivery.created_ms, WebhookDelivery.id, after, limit, ascending)
    rows = session.scalars(listed).all()
    named = select(WebhookEvent).where(WebhookEvent.id.in_({row.event_id for row in rows}))
    events = {event.id: event for event in session.scalars(named)}
    return [(row, events[row.event_id]) for row in rows]


def listening(session: Session, event_type: str) -> set[str]:
    """Projects with a receiver that wants events of this type."""
    rows = session.execute(select(WebhookEndpoint.project_id, WebhookEndpoint.event_types))
    return {row.project_id for row in rows if event_type in row.event_types}


def known_keys(session: Session, keys: Collection[str]) -> set[str]:
    """Those of the names under which an event was noted."""
    return set(session.scalars(select(WebhookEvent.key).where(WebhookEvent.key.in_(keys))))


def add_event(session: Session, project_id: str, event_type: str, data: dict[str, Any], key: str) -> bool:
    """Note an event. False: it was noted before, under this key."""
    row = {
        "id": ids.event_id(),
        "project_id": project_id,
        "type": event_type,
        "data": data,
        "key": key,
        "created_ms": database_now_ms(session),
        "is_spread": False,
    }
    noted = insert(session, WebhookEvent).values(row).on_conflict_do_nothing(index_elements=("key",))
    return session.scalar(noted.returning(WebhookEvent.id)) is not None


def oldest_unsent_ms(session: Session) -> int | None:
    """When the oldest event that some receiver still waits for was noted; None if none does. Served by
    ix_webhook_events_new and ix_webhook_deliveries_due."""
    unspread = session.scalar(select(func.min(WebhookEvent.created_ms)).where(WebhookEvent.is_spread.is_(False)))
    pending = session.scalar(select(func.min(WebhookDelivery.created_ms)).where(WebhookDelivery.state == "pending"))
    return min((int(at_ms) for at_ms in (unspread, pending) if at_ms is not None), default=None)
