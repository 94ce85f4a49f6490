"""The table of audit rows: what operators and keys have changed. Triggers refuse to change, delete or replace a row."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, Id, Json, Millis


class AuditRow(Base):
    """One change: who (`actor_...`, from `address`), what (`action`), on what (`target_id` of `project_id`), when."""

    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "effective_ms", "id"),)

    id: Mapped[Id]
    action: Mapped[str] = mapped_column(String(64))
    actor_kind: Mapped[str] = mapped_column(String(16))
    actor_id: Mapped[str] = mapped_column(String(128))
    actor_project_id: Mapped[str | None] = mapped_column(String(64))
    address: Mapped[str | None] = mapped_column(String(64))
    project_id: Mapped[str | None] = mapped_column(String(64), index=True)
    target_id: Mapped[str] = mapped_column(String(255), index=True)
    details: Mapped[dict[str, Any]] = mapped_column(Json)
    effective_ms: Mapped[Millis]
