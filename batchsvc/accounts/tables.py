"""Tables of projects (the tenants) and their API keys."""

from __future__ import annotations

from sqlalchemy import Boolean, ForeignKey, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Id, Millis


class Project(Base):
    """A tenant. `salt` separates its prefix cache from every other project's."""

    __tablename__ = "projects"

    id: Mapped[Id]
    name: Mapped[str] = mapped_column(String(128))
    salt: Mapped[str] = mapped_column(String(64))
    weight: Mapped[int] = mapped_column(Integer, default=1)
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
