"""Table of files: what was uploaded, and the results that we wrote."""

from __future__ import annotations

from sqlalchemy import ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Id, Millis


class File(Base):
    """A stored object. A deleted or expired one keeps its row; its object is collected later."""

    __tablename__ = "files"
    __table_args__ = (Index("ix_files_listing", "project_id", "created_ms", "id"),)

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(255))
    s3_key: Mapped[str] = mapped_column(String(512), unique=True)
    etag: Mapped[str] = mapped_column(String(128), default="")
    sha256: Mapped[str] = mapped_column(String(64))
    size_bytes: Mapped[int] = mapped_column("bytes", BigInt, default=0)
    created_ms: Mapped[Millis]
    expires_ms: Mapped[int | None] = mapped_column(BigInt)
    deleted_ms: Mapped[int | None] = mapped_column(BigInt)
