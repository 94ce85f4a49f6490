"""Tables of files: what was uploaded, the results that we wrote, and uploads whose parts still come in."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Id, Json, Millis


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


class Upload(Base):
    """A file that comes in parts, each an object of its own until somebody says in which order they belong."""

    __tablename__ = "uploads"
    __table_args__ = (
        Index(
            "ix_uploads_pending",
            "expires_ms",
            sqlite_where=text("status = 'pending'"),
            postgresql_where=text("status = 'pending'"),
        ),
    )

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(255))
    size_bytes: Mapped[int] = mapped_column("bytes", BigInt)  # as its creator says
    file_life_s: Mapped[int] = mapped_column(Integer)  # of the file that it becomes
    status: Mapped[str] = mapped_column(String(16))  # pending, completed, cancelled or expired
    created_ms: Mapped[Millis]
    expires_ms: Mapped[Millis]
    part_ids: Mapped[list[Any] | None] = mapped_column(Json)  # of a completed one, in their order
    file_id: Mapped[str | None] = mapped_column(String(64))


class UploadPart(Base):
    """A part of a pending upload; when the upload ends, its row and its object go."""

    __tablename__ = "upload_parts"

    id: Mapped[Id]
    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id"), index=True)
    s3_key: Mapped[str] = mapped_column(String(512), unique=True)
    etag: Mapped[str] = mapped_column(String(128))
    size_bytes: Mapped[int] = mapped_column("bytes", BigInt)
    created_ms: Mapped[Millis]
