"""Tables of projects (the tenants), their API keys, and the answers that a repeated call gets again."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, ForeignKey, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Id, Json, Millis


class Project(Base):
    """A tenant. `salt` separates its prefix cache from every other project's."""

    __tablename__ = "projects"

    id: Mapped[Id]
    name: Mapped[str] = mapped_column(String(128))
    salt: Mapped[str] = mapped_column(String(64))
    weight: Mapped[int] = mapped_column(Integer, default=1)
    quota_tokens: Mapped[int | None] = mapped_column(BigInt)  # of all unfinished batches; null: the setting's
    budget_nanos: Mapped[int | None] = mapped_column(BigInt)  # the most that it may spend in a month (UTC)
    is_prepaid: Mapped[bool] = mapped_column(Boolean, default=False)  # it spends only what was topped up
    alert_percents: Mapped[list[Any] | None] = mapped_column(Json)  # of a limit, to be told of; null: the usual ones
    created_ms: Mapped[Millis]


class ApiKey(Base):
    """A key, stored as a hash and shown once. `id` is the public part that stands inside the key."""

    __tablename__ = "api_keys"

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(128))
    hash: Mapped[str] = mapped_column(String(64))
    is_admin: Mapped[bool] = mapped_column(Boolean, default=False)
    created_ms: Mapped[Millis]
    revoked_ms: Mapped[int | None] = mapped_column(BigInt)


class IdempotentAnswer(Base):
    """What a call with an `Idempotency-Key` was answered. `fingerprint` tells a repetition from another call."""

    __tablename__ = "idempotent_answers"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    created_ms: Mapped[int] = mapped_column(BigInt, index=True)
