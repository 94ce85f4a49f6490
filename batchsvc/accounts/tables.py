"""Tables of projects (the tenants), their API keys and service accounts, and what a repeated call was answered."""

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
    requests_per_minute: Mapped[int | None] = mapped_column(BigInt)  # of all its keys; null: the setting's, as below
    max_open_batches: Mapped[int | None] = mapped_column(BigInt)
    max_stored_bytes: Mapped[int | None] = mapped_column(BigInt)
    created_ms: Mapped[Millis]
    archived_ms: Mapped[int | None] = mapped_column(BigInt)  # since then its keys are refused


class ApiKey(Base):
    """A key, stored as a hash and shown once. `id` is the public part that stands inside the key."""

    __tablename__ = "api_keys"

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(128))
    hash: Mapped[str] = mapped_column(String(64))
    is_admin: Mapped[bool] = mapped_column(Boolean, default=False)
    scopes: Mapped[list[Any] | None] = mapped_column(Json)  # what it may do, see scopes.py; null: everything
    service_account_id: Mapped[str | None] = mapped_column(String(64))  # whom it belongs to, if not to a person
    requests_per_minute: Mapped[int | None] = mapped_column(BigInt)  # null: no limit but its project's, as below
    max_open_batches: Mapped[int | None] = mapped_column(BigInt)
    max_stored_bytes: Mapped[int | None] = mapped_column(BigInt)
    created_ms: Mapped[Millis]
    expires_ms: Mapped[int | None] = mapped_column(BigInt)
    last_used_ms: Mapped[int | None] = mapped_column(BigInt)  # true to about a minute
    revoked_ms: Mapped[int | None] = mapped_column(BigInt)
    replaced_by_id: Mapped[str | None] = mapped_column(String(64))  # the key that it was rotated to


class ServiceAccount(Base):
    """Somebody of a project who is a program: keys belong to it, and end with it."""

    __tablename__ = "service_accounts"

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), index=True)
    name: Mapped[str] = mapped_column(String(128))
    role: Mapped[str] = mapped_column(String(16))
    created_ms: Mapped[Millis]
    deleted_ms: Mapped[int | None] = mapped_column(BigInt)


class IdempotentAnswer(Base):
    """What a call with an `Idempotency-Key` was answered. `fingerprint` tells a repetition from another call."""

    __tablename__ = "idempotent_answers"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    created_ms: Mapped[int] = mapped_column(BigInt, index=True)
