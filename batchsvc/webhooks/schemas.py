"""Wire shapes of receivers, tests and deliveries, as the official client's `client.webhooks` has them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from batchsvc.webhooks import signing
from batchsvc.webhooks.events import EventType
from batchsvc.webhooks.tables import WebhookDelivery, WebhookEndpoint, WebhookEvent


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class CreateEndpoint(_Body):
    """Body of a new receiver."""

    name: str = Field(min_length=1, max_length=128)
    url: str
    event_types: list[str]


class UpdateEndpoint(_Body):
    """Body of a change to a receiver; what isn't named stays."""

    name: str | None = Field(default=None, min_length=1, max_length=128)
    url: str | None = None
    event_types: list[str] | None = None


class RotateSecret(_Body):
    """Body of a rotation. Without it the old secret ends at once, as with OpenAI."""

    keep_old_secret_active_for_24_hours: bool = False


class SendTest(_Body):
    """Body of a test."""

    event_type: str = EventType.COMPLETED


def endpoint_object(row: WebhookEndpoint) -> dict[str, Any]:
    """A receiver, without its secret. `failures_in_a_row` and `paused_until` are extensions."""
    return {
        "id": row.id,
        "object": "webhook_endpoint",
        "name": row.name,
        "url": row.url,
        "event_types": row.event_types,
        "signing_secret_hint": signing.hint(row.secret),
        "created_at": row.created_ms // 1000,
        "updated_at": row.updated_ms // 1000,
        "failures_in_a_row": row.failures,
        "paused_until": row.open_until_ms // 1000 if row.open_until_ms else None,
    }


def with_secret(row: WebhookEndpoint) -> dict[str, Any]:
    """A receiver with its secret, which is shown when it is made, this once."""
    return {**endpoint_object(row), "signing_secret": row.secret}


def deleted_object(endpoint_id: str) -> dict[str, Any]:
    """A receiver that is gone."""
    return {"id": endpoint_id, "object": "webhook_endpoint.deleted", "deleted": True}


def tested_object(endpoint_id: str, event_type: EventType, status: int) -> dict[str, Any]:
    """What a receiver answered to a test."""
    return {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": endpoint_id,
        "event_type": event_type,
        "status_code": status,
        "success": True,
    }


def delivery_object(row: WebhookDelivery, event: WebhookEvent) -> dict[str, Any]:
    """A delivery with its log; an extension."""
    return {
        "id": row.id,
        "object": "webhook_delivery",
        "webhook_endpoint_id": row.endpoint_id,
        "event_id": event.id,
        "event_type": event.type,
        "data": event.data,
        "state": row.state,
        "created_at": row.created_ms // 1000,
        "next_attempt_at": row.due_ms // 1000 if row.state == "pending" else None,
        "ended_at": None if row.ended_ms is None else row.ended_ms // 1000,
        "attempts": [
            {
                "at": attempt["at_ms"] // 1000,
                "status_code": attempt["status"],
                "error": attempt["error"],
                "took_ms": attempt["took_ms"],
            }
            for attempt in row.attempts
        ],
    }
