"""Tables of files: what was uploaded, the results that we wrote, uploads whose parts still come in; the buckets of
tenants that files may come from and go to; how long files live, and what is to be wiped out after its deletion."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, ForeignKey, Index, Integer, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Id, Json, Millis


class File(Base):
    """A stored object. A deleted or expired one keeps its row; its object is collected later."""

    __tablename__ = "files"
    __table_args__ = (
        Index("ix_files_listing", "project_id", "created_ms", "id"),
        Index(
            "ix_files_source",
            "project_id",
            "source_etag",
            sqlite_where=text("source_uri IS NOT NULL"),
            postgresql_where=text("source_uri IS NOT NULL"),
        ),
        Index(
            "ix_files_expiry",
            "expires_ms",
            sqlite_where=text("deleted_ms IS NULL"),
            postgresql_where=text("deleted_ms IS NULL"),
        ),
    )

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    api_key_id: Mapped[str | None] = mapped_column(String(64))  # whose limit of stored bytes it counts to
    purpose: Mapped[str] = mapped_column(String(32))
    filename: Mapped[str] = mapped_column(String(255))
    s3_key: Mapped[str] = mapped_column(String(512), unique=True)
    etag: Mapped[str] = mapped_column(String(128), default="")
    sha256: Mapped[str] = mapped_column(String(64))
    size_bytes: Mapped[int] = mapped_column("bytes", BigInt, default=0)
    created_ms: Mapped[Millis]
    expires_ms: Mapped[int | None] = mapped_column(BigInt)
    deleted_ms: Mapped[int | None] = mapped_column(BigInt)
    source_uri: Mapped[str | None] = mapped_column(String(1100))  # of an object in a tenant's store, and of it
    source_etag: Mapped[str | None] = mapped_column(String(128))  # this version; `etag` is empty until it was copied
    num_failures: Mapped[int] = mapped_column(Integer, default=0)  # of attempts to copy it
    source_error: Mapped[str | None] = mapped_column(String(2048))  # why it never will be


class TenantStore(Base):
    """A prefix of a bucket that an operator has registered for a project, and the keys that reach it."""

    __tablename__ = "tenant_stores"
    __table_args__ = (UniqueConstraint("project_id", "bucket", "prefix"),)

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    bucket: Mapped[str] = mapped_column(String(63))
    prefix: Mapped[str] = mapped_column(String(1024))  # empty, or a folder with its last slash
    endpoint: Mapped[str | None] = mapped_column(String(2048))  # null: AWS
    region: Mapped[str] = mapped_column(String(64))
    access_key: Mapped[str] = mapped_column(String(256))
    secret_key: Mapped[str] = mapped_column(String(256))  # of a row from before secrets were sealed; else empty
    sealed_secret: Mapped[str | None] = mapped_column(String(1024))  # batchsvc/sealing.py
    created_ms: Mapped[Millis]
    updated_ms: Mapped[Millis]


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
    file_id: Mapped[str | None] = mapped_column(String(64), index=True)


class UploadPart(Base):
    """A part of a pending upload; when the upload ends, its row and its object go."""

    __tablename__ = "upload_parts"

    id: Mapped[Id]
    upload_id: Mapped[str] = mapped_column(ForeignKey("uploads.id"), index=True)
    s3_key: Mapped[str] = mapped_column(String(512), unique=True)
    etag: Mapped[str] = mapped_column(String(128))
    size_bytes: Mapped[int] = mapped_column("bytes", BigInt)
    created_ms: Mapped[Millis]


class RetentionDefault(Base):
    """How long files of a project live whose calls don't say, in seconds; null: as the setting says."""

    __tablename__ = "retention_defaults"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"), primary_key=True)
    input_life_s: Mapped[int | None] = mapped_column(Integer)
    output_life_s: Mapped[int | None] = mapped_column(Integer)
    updated_ms: Mapped[Millis]


class Purge(Base):
    """Something whose content has to leave every store of ours, and how far that is. See files/purge_queries.py."""

    __tablename__ = "purges"
    __table_args__ = (
        Index(
            "ix_purges_due",
            "is_backlog",
            "due_ms",
            sqlite_where=text("purged_ms IS NULL"),
            postgresql_where=text("purged_ms IS NULL"),
        ),
    )

    subject_id: Mapped[Id]
    kind: Mapped[str] = mapped_column(String(8), primary_key=True)  # file, upload, batch, or plan: of an ended batch
    deleted_ms: Mapped[Millis]
    due_ms: Mapped[Millis]
    swept_ms: Mapped[int | None] = mapped_column(BigInt)  # when it was wiped the first time
    purged_ms: Mapped[int | None] = mapped_column(BigInt)  # and the last time, when nobody could write any more
    num_failures: Mapped[int] = mapped_column(Integer, default=0)
    is_backlog: Mapped[bool] = mapped_column(Boolean, default=False)  # deleted before there were purges: it comes last
