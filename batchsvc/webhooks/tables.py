"""Tables of webhooks: receivers, the outbox of events, and who was told what."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, ForeignKey, Index, Integer, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Count, Id, Json, Millis


class WebhookEndpoint(Base):
    """A receiver of a project. One process at a time sends to it: the lease and the fence are as a unit's."""

    __tablename__ = "webhook_endpoints"
    __table_args__ = (Index("ix_webhook_endpoints_listing", "project_id", "created_ms", "id"),)

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    name: Mapped[str] = mapped_column(String(128))
    url: Mapped[str] = mapped_column(String(2048))
    event_types: Mapped[list[Any]] = mapped_column(Json)
    secret: Mapped[str] = mapped_column(String(128))  # as it is: what signs can't be kept as a hash
    old_secrets: Mapped[list[Any]] = mapped_column(Json)  # [[secret, until_ms]]: they sign too, until then
    created_ms: Mapped[Millis]
    updated_ms: Mapped[Millis]
    failures: Mapped[int] = mapped_column(Integer, default=0)  # in a row
    open_until_ms: Mapped[Count]  # the breaker: nothing is sent before then
    epoch: Mapped[Count]
    owner: Mapped[str | None] = mapped_column(String(128))
    lease_ms: Mapped[Count]


class WebhookEvent(Base):
    """The outbox. A trigger of the database (revision 0004) adds the end of a batch in the statement that ends it,
    whoever does, if its project has receivers. `key` names what happened, so that it is noted once."""

    __tablename__ = "webhook_events"
    __table_args__ = (
        Index(
            "ix_webhook_events_new",
            "created_ms",
            sqlite_where=text("is_spread = 0"),
            postgresql_where=text("NOT is_spread"),
        ),
        Index("ix_webhook_events_created", "created_ms"),
    )

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(String(64))
    type: Mapped[str] = mapped_column(String(64))
    data: Mapped[dict[str, Any]] = mapped_column(Json)
    key: Mapped[str] = mapped_column(String(200), unique=True)
    created_ms: Mapped[Millis]
    is_spread: Mapped[bool] = mapped_column(Boolean, default=False)  # the receivers that want it have a delivery


class WebhookDelivery(Base):
    """An event on its way to a receiver, and the log of that."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        UniqueConstraint("endpoint_id", "event_id"),
        Index(
            "ix_webhook_deliveries_due",
            "endpoint_id",
            "due_ms",
            sqlite_where=text("state = 'pending'"),
            postgresql_where=text("state = 'pending'"),
        ),
        Index("ix_webhook_deliveries_listing", "endpoint_id", "created_ms", "id"),
        Index("ix_webhook_deliveries_event", "event_id"),
    )

    id: Mapped[Id]
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("webhook_endpoints.id"))
    event_id: Mapped[str] = mapped_column(ForeignKey("webhook_events.id"))
    state: Mapped[str] = mapped_column(String(16))  # pending, delivered, failed (given up)
    created_ms: Mapped[Millis]
    due_ms: Mapped[Millis]
    ended_ms: Mapped[int | None] = mapped_column(BigInt)
    attempts: Mapped[list[Any]] = mapped_column(Json)  # [{at_ms, status, error, took_ms}]
