"""SQL of sending: who is told what, who may send, and what came of it.

    spread   an event of the outbox gets one delivery for each receiver that wants it
    claim    a sender takes a receiver that something is due for, under a lease and a higher `epoch`
    next     the first delivery that is due to it; nothing is written of an attempt before it was made, so whoever
             takes over from a sender that died makes it again: at least once, with the same id
    record   what came of it: delivered, or due again later, or given up

A failure counts only under the epoch that it was made under; a success always counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, func, select, update
from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.db.session import database_now_ms
from batchsvc.webhooks import retry
from batchsvc.webhooks.tables import WebhookDelivery, WebhookEndpoint, WebhookEvent

_SPREAD_AT_ONCE = 200
_GIVE_UP_MS = 3 * 86_400_000
_FORGET_MS = 30 * 86_400_000
_FORGET_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to send to a receiver."""

    endpoint_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One attempt to make. `secrets` are those that sign now, the newest first."""

    delivery_id: str
    event_id: str
    event_type: str
    created_ms: int
    data: dict[str, Any]
    url: str
    secrets: list[str]
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an attempt: the receiver's status, or why there is none."""

    status: int | None = None
    error: str | None = None
    took_ms: int = 0

    @property
    def is_delivered(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def has_new(session: Session) -> bool:
    """Whether an event waits to be spread."""
    return session.scalar(select(WebhookEvent.id).where(~WebhookEvent.is_spread).limit(1)) is not None


def spread(session: Session) -> int:
    """Give each new event its deliveries. Returns how many events. A receiver hears nothing from before its time."""
    new = select(WebhookEvent).where(~WebhookEvent.is_spread).order_by(WebhookEvent.created_ms).limit(_SPREAD_AT_ONCE)
    events = session.scalars(new.with_for_update(skip_locked=True)).all()
    if not events:
        return 0
    projects = {event.project_id for event in events}
    receivers: dict[str, list[WebhookEndpoint]] = {}
    listening = select(WebhookEndpoint).where(WebhookEndpoint.project_id.in_(projects)).order_by(WebhookEndpoint.id)
    for endpoint in session.scalars(listening.with_for_update(read=True, key_share=True)):  # nobody deletes it now
        receivers.setdefault(endpoint.project_id, []).append(endpoint)
    for event in events:
        event.is_spread = True
        for endpoint in receivers.get(event.project_id, []):
            if event.type in endpoint.event_types and endpoint.created_ms <= event.created_ms:
                session.add(
                    WebhookDelivery(
                        id=ids.delivery_id(),
                        endpoint_id=endpoint.id,
                        event_id=event.id,
                        state="pending",
                        created_ms=event.created_ms,
                        due_ms=event.created_ms,
                        ended_ms=None,
                        attempts=[],
                    )
                )
    session.flush()
    return len(events)


def num_due(session: Session) -> int:
    """How many receivers nobody sends to though something is due for them."""
    return session.scalar(select(func.count(WebhookEndpoint.id)).where(*_is_due(database_now_ms(session)))) or 0


def claim(session: Session, owner: str, lease_s: float) -> Claim | None:
    """Take the receiver that was served longest ago. None: nothing is due, or others are at it."""
    now = database_now_ms(session)
    due = select(WebhookEndpoint).where(*_is_due(now)).order_by(WebhookEndpoint.lease_ms, WebhookEndpoint.id).limit(1)
    endpoint = session.scalars(
        due.with_for_update(skip_locked=True).execution_options(populate_existing=True)
    ).one_or_none()
    if endpoint is None:
        return None
    endpoint.epoch += 1
    endpoint.owner, endpoint.lease_ms = owner, now + round(lease_s * 1000)
    return Claim(endpoint_id=endpoint.id, epoch=endpoint.epoch)


def next_due(session: Session, claimed: Claim, lease_s: float) -> Sending | None:
    """The next attempt to make under a claim, and its lease prolonged. None: nothing is due, or the claim is lost."""
    endpoint = _held(session, claimed)
    if endpoint is None:
        return None
    now = database_now_ms(session)
    if endpoint.open_until_ms > now:
        return None
    found = session.execute(
        select(WebhookDelivery, WebhookEvent)
        .join(WebhookEvent, WebhookEvent.id == WebhookDelivery.event_id)
        .where(
            WebhookDelivery.endpoint_id == endpoint.id,
            WebhookDelivery.state == "pending",
            WebhookDelivery.due_ms <= now,
        )
        .order_by(WebhookDelivery.due_ms, WebhookDelivery.id)
        .limit(1)
    ).first()
    if found is None:
        return None
    endpoint.lease_ms = now + round(lease_s * 1000)
    delivery, event = found[0], found[1]
    return Sending(
        delivery_id=delivery.id,
        event_id=event.id,
        event_type=event.type,
        created_ms=event.created_ms,
        data=event.data,
        url=endpoint.url,
        secrets=secrets_of(endpoint, now),
        now_ms=now,
    )


def record(session: Session, claimed: Claim, sending: Sending, outcome: Outcome, chance: float) -> str | None:
    """Write what came of an attempt. Returns the state of the delivery; None: it isn't there, or not ours any more."""
    mine = _held(session, claimed)
    found = select(WebhookDelivery).where(WebhookDelivery.id == sending.delivery_id).with_for_update()
    delivery = session.scalars(found.execution_options(populate_existing=True)).first()
    if delivery is None or delivery.state == "delivered" or (mine is None and not outcome.is_delivered):
        return None
    now = database_now_ms(session)
    attempt = {"at_ms": sending.now_ms, "status": outcome.status, "error": outcome.error, "took_ms": outcome.took_ms}
    delivery.attempts = [*delivery.attempts, attempt]
    if outcome.is_delivered:
        delivery.state, delivery.ended_ms = "delivered", now
    else:
        again = retry.next_due_ms(len(delivery.attempts), now, chance)
        if again is None:
            delivery.state, delivery.ended_ms = "failed", now
        else:
            delivery.due_ms = again
    if mine is not None:
        mine.failures = 0 if outcome.is_delivered else mine.failures + 1
        mine.open_until_ms = retry.open_until_ms(mine.failures, now)
    return delivery.state


def release(session: Session, claimed: Claim) -> None:
    """Let go of a receiver; others that wait longer go first."""
    endpoint = _held(session, claimed)
    if endpoint is not None:
        endpoint.lease_ms = database_now_ms(session)


def give_up_old(session: Session) -> int:
    """Give up what couldn't be delivered for days, however rarely it was tried. Returns how many."""
    now = database_now_ms(session)
    old = update(WebhookDelivery).where(
        WebhookDelivery.state == "pending", WebhookDelivery.created_ms < now - _GIVE_UP_MS
    )
    given_up = old.values(state="failed", ended_ms=now).execution_options(synchronize_session=False)
    return len(session.execute(given_up.returning(WebhookDelivery.id)).all())


def forget_old(session: Session) -> int:
    """Delete events after a month, with the log of their deliveries. Returns how many events."""
    before_ms = database_now_ms(session) - _FORGET_MS
    old = select(WebhookEvent.id).where(WebhookEvent.created_ms < before_ms).limit(_FORGET_AT_ONCE)
    event_ids = session.scalars(old).all()
    if event_ids:
        session.execute(delete(WebhookDelivery).where(WebhookDelivery.event_id.in_(event_ids)))
        session.execute(delete(WebhookEvent).where(WebhookEvent.id.in_(event_ids)))
    return len(event_ids)


def secrets_of(endpoint: WebhookEndpoint, now_ms: int) -> list[str]:
    """What signs now."""
    return [endpoint.secret, *(secret for secret, until_ms in endpoint.old_secrets if until_ms > now_ms)]


def _held(session: Session, claimed: Claim) -> WebhookEndpoint | None:
    found = select(WebhookEndpoint).where(WebhookEndpoint.id == claimed.endpoint_id).with_for_update()
    endpoint = session.scalars(found.execution_options(populate_existing=True)).first()
    return endpoint if endpoint is not None and endpoint.epoch == claimed.epoch else None


def _is_due(now_ms: int) -> tuple[ColumnElement[bool], ...]:
    waits = exists(
        select(WebhookDelivery.id).where(
            WebhookDelivery.endpoint_id == WebhookEndpoint.id,
            WebhookDelivery.state == "pending",
            WebhookDelivery.due_ms <= now_ms,
        )
    )
    return (WebhookEndpoint.lease_ms <= now_ms, WebhookEndpoint.open_until_ms <= now_ms, waits)
