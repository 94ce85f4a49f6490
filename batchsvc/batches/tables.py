"""Tables of models, batches, windows, units, parts, segments and workers: the state of all work."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, ForeignKey, Index, Integer, LargeBinary, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from batchsvc.db.base import Base, BigInt, Count, Id, Json, Millis, Nanos


class Model(Base):
    """A model that batches may name, or (with `alias_of`) another name for one."""

    __tablename__ = "models"

    id: Mapped[str] = mapped_column(String(255), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), default="", index=True)
    path: Mapped[str] = mapped_column(String(1024), default="")
    alias_of: Mapped[str | None] = mapped_column(String(255))
    context_tokens: Mapped[int] = mapped_column(Integer, default=0)
    weight_format: Mapped[str] = mapped_column(String(16), default="bf16")
    kv_format: Mapped[str] = mapped_column(String(16), default="bf16")
    created_ms: Mapped[Millis]


class Batch(Base):
    """A job. `status` moves only as batches/lifecycle.py allows; counters only grow, in part commits."""

    __tablename__ = "batches"
    __table_args__ = (
        Index("ix_batches_listing", "project_id", "created_ms", "id"),
        Index("ix_batches_status", "status", "expires_ms"),
    )

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    api_key_id: Mapped[str] = mapped_column(String(64))
    endpoint: Mapped[str] = mapped_column(String(64))
    input_file_id: Mapped[str] = mapped_column(String(64), index=True)
    completion_window: Mapped[str] = mapped_column(String(16))
    tier: Mapped[str] = mapped_column(String(32))
    on_invalid: Mapped[str] = mapped_column(String(8), default="fail")
    name: Mapped[str | None] = mapped_column(String(128))
    metadata_json: Mapped[dict[str, Any] | None] = mapped_column("metadata", Json)
    output_expires_after_s: Mapped[int | None] = mapped_column(Integer)

    status: Mapped[str] = mapped_column(String(16))
    why: Mapped[str | None] = mapped_column(String(16))  # the terminal status, fixed when the batch is sealed
    created_ms: Mapped[Millis]
    expires_ms: Mapped[Millis]
    in_progress_ms: Mapped[int | None] = mapped_column(BigInt)
    finalizing_ms: Mapped[int | None] = mapped_column(BigInt)
    cancelling_ms: Mapped[int | None] = mapped_column(BigInt)
    ended_ms: Mapped[int | None] = mapped_column(BigInt)
    errors: Mapped[list[Any] | None] = mapped_column(Json)  # the first 1,000 problems, as the API shows them
    errors_total: Mapped[Count]

    model_requested: Mapped[str | None] = mapped_column(String(255))  # the extension `model` of create
    model_id: Mapped[str | None] = mapped_column(String(255))  # what it resolved to, pinned by the planner
    model_digest: Mapped[str | None] = mapped_column(String(64))
    weight_format: Mapped[str | None] = mapped_column(String(16))
    kv_format: Mapped[str | None] = mapped_column(String(16))
    price_version: Mapped[int] = mapped_column(Integer)  # the price book, pinned at creation
    rates: Mapped[dict[str, Any] | None] = mapped_column(
        Json
    )  # {"tier": {...}, "standard": {...}}, pinned when the model is
    aliases: Mapped[dict[str, Any] | None] = mapped_column(Json)  # the alias table, pinned at creation
    reserved_nanos: Mapped[Nanos]
    on_quota: Mapped[str] = mapped_column(String(8), default="wait")  # wait, or fail, when the quota is full
    has_quota: Mapped[bool] = mapped_column(Boolean, default=True)  # false: in progress, and waits for quota
    est_tokens: Mapped[Count]  # predicted work: the sum of its units'

    total: Mapped[Count]
    completed: Mapped[Count]
    failed: Mapped[Count]
    input_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    output_tokens: Mapped[Count]
    cost_nanos: Mapped[Nanos]
    standard_nanos: Mapped[Nanos]  # what the same lines cost at the standard tier

    plan_epoch: Mapped[Count]
    plan_owner: Mapped[str | None] = mapped_column(String(128))
    plan_lease_ms: Mapped[Count]
    fin_epoch: Mapped[Count]
    fin_owner: Mapped[str | None] = mapped_column(String(128))
    fin_lease_ms: Mapped[Count]
    cancel_seq: Mapped[Count]
    output_file_id: Mapped[str | None] = mapped_column(String(64))
    error_file_id: Mapped[str | None] = mapped_column(String(64))


class Window(Base):
    """A run of consecutive lines that was planned together; where the next one starts in the input."""

    __tablename__ = "windows"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    no: Mapped[int] = mapped_column(Integer, primary_key=True)
    first_line: Mapped[Count]  # physical line numbers, 1-based, inclusive
    last_line: Mapped[Count]
    num_lines: Mapped[Count]  # requests: blank lines don't count
    num_rejected: Mapped[Count]
    next_offset: Mapped[Count]  # where the next window starts: bytes (JSONL) or rows (Parquet)
    input_tokens: Mapped[Count]
    line_nos_key: Mapped[str] = mapped_column(String(512), default="")  # object: line numbers and custom_ids
    line_nos_sha256: Mapped[str] = mapped_column(String(64), default="")
    is_damaged: Mapped[bool] = mapped_column(Boolean, default=False)  # an object of its plan has to be rebuilt
    reserve_nanos: Mapped[Nanos]


class Unit(Base):
    """The leased piece of a batch. `epoch` is the fence: every write that matters names it."""

    __tablename__ = "units"
    __table_args__ = (
        UniqueConstraint("batch_id", "no"),
        Index(
            "ix_units_claim",
            "model_digest",
            "not_before_ms",
            sqlite_where=text("state = 'ready'"),
            postgresql_where=text("state = 'ready'"),
        ),
        Index(
            "ix_units_lease",
            "lease_ms",
            sqlite_where=text("state = 'leased'"),
            postgresql_where=text("state = 'leased'"),
        ),
    )

    id: Mapped[Id]
    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"))
    project_id: Mapped[str] = mapped_column(String(64))
    model_digest: Mapped[str] = mapped_column(String(64))
    window_no: Mapped[int] = mapped_column(Integer)
    no: Mapped[int] = mapped_column(Integer)  # position in the plan of the batch
    s3_key: Mapped[str] = mapped_column(String(512))
    sha256: Mapped[str] = mapped_column(String(64))
    num_lines: Mapped[int] = mapped_column(Integer)
    est_tokens: Mapped[Count]  # predicted work: uncached input and predicted output tokens
    state: Mapped[str] = mapped_column(String(8))  # pending (batch still validating), ready, leased, done, sealed
    epoch: Mapped[Count]
    owner: Mapped[str | None] = mapped_column(String(128))
    lease_ms: Mapped[Count]
    not_before_ms: Mapped[Count]
    ticket_ms: Mapped[Count]  # when a ticket was last sent
    done_bitmap: Mapped[bytes] = mapped_column(LargeBinary)  # bit i: line i of the unit file, in file order
    num_done: Mapped[int] = mapped_column(Integer, default=0)
    crash_count: Mapped[int] = mapped_column(Integer, default=0)


class Part(Base):
    """An immutable result object. It counts from the commit of this row on, never before; not if it `is_void`."""

    __tablename__ = "parts"
    __table_args__ = (
        Index("ix_parts_window", "batch_id", "window_no"),
        Index("ix_parts_void", "batch_id", sqlite_where=text("is_void"), postgresql_where=text("is_void")),
    )

    id: Mapped[Id]
    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"))
    unit_id: Mapped[str | None] = mapped_column(String(64), index=True)  # null: lines that the planner rejected
    window_no: Mapped[int] = mapped_column(Integer)
    epoch: Mapped[Count]
    s3_key: Mapped[str] = mapped_column(String(512), unique=True)
    sha256: Mapped[str] = mapped_column(String(64))
    size_bytes: Mapped[int] = mapped_column("bytes", BigInt, default=0)
    bitmap: Mapped[bytes | None] = mapped_column(LargeBinary)
    is_void: Mapped[bool] = mapped_column(Boolean, default=False)  # found damaged: its lines are run again
    lines_ok: Mapped[Count]
    lines_err: Mapped[Count]
    input_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    output_tokens: Mapped[Count]
    cost_nanos: Mapped[Nanos]
    standard_nanos: Mapped[Nanos]
    created_ms: Mapped[Millis]


class Segment(Base):
    """How far one finalizer attempt has come: multipart uploads, their parts and the carried remainder."""

    __tablename__ = "segments"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    fin_epoch: Mapped[int] = mapped_column(Integer, primary_key=True)
    window_no: Mapped[int] = mapped_column(Integer, primary_key=True)
    state: Mapped[dict[str, Any]] = mapped_column(Json)


class Worker(Base):
    """An engine worker process that is, or was, alive; a new row for every start."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    model_digest: Mapped[str] = mapped_column(String(64), index=True)
    beat_ms: Mapped[Count]
    is_draining: Mapped[bool] = mapped_column(Boolean, default=False)
    stats: Mapped[dict[str, Any] | None] = mapped_column(Json)


class Garbage(Base):
    """An object that nobody needs after `not_before_ms`; the reaper deletes it."""

    __tablename__ = "garbage"

    s3_key: Mapped[str] = mapped_column(String(512), primary_key=True)
    not_before_ms: Mapped[Millis]
