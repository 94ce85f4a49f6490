"""The events that a receiver can ask for, and how one is written. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import orjson


class EventType(StrEnum):
    """Types of events. The ends of a batch are the official client's; the others are extensions."""

    COMPLETED = "batch.completed"
    FAILED = "batch.failed"
    EXPIRED = "batch.expired"
    CANCELLED = "batch.cancelled"
    AT_RISK = "batch.at_risk"
    SPEND_ALERT = "spend.alert"


def body_of(event_id: str, kind: str, created_ms: int, data: Mapping[str, Any]) -> bytes:
    """An event as it is sent: it names what happened, and who wants to know more asks the API."""
    return orjson.dumps(
        {"object": "event", "id": event_id, "type": kind, "created_at": created_ms // 1000, "data": data}
    )


def sample_data(kind: EventType) -> dict[str, Any]:
    """The data of a test event."""
    if kind != EventType.SPEND_ALERT:
        return {"id": "batch_test"}
    return {
        "id": "proj_test",
        "limit": "budget",
        "percent": 80,
        "month": "2026-01",
        "spent_nanos": 8_000_000_000,
        "limit_nanos": 10_000_000_000,
    }
