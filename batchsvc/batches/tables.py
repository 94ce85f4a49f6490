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
    project_id: Mapped[str | None] = mapped_column(String(64))  # who alone may use it: its lines have trained it
    context_tokens: Mapped[int] = mapped_column(Integer, default=0)
    weight_format: Mapped[str] = mapped_column(String(16), default="bf16")
    kv_format: Mapped[str] = mapped_column(String(16), default="bf16")
    quality: Mapped[dict[str, Any] | None] = mapped_column(Json)  # the verdict on these, when a worker has told it
    swap_ms: Mapped[int | None] = mapped_column(BigInt)  # what it took a worker last to change over to it
    served_ms: Mapped[Count]  # when a worker last let go of it, to serve another one
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

    num_requests: Mapped[Count]  # of a message batch, known before it is planned
    deleted_ms: Mapped[int | None] = mapped_column(BigInt)  # when a message batch was taken out of sight

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
    warnings: Mapped[list[Any] | None] = mapped_column(Json)  # what was passed over in lines: the first 1,000, likewise

    model_requested: Mapped[str | None] = mapped_column(String(255))  # the extension `model` of create
    model_id: Mapped[str | None] = mapped_column(String(255))  # what it resolved to, pinned by the planner
    model_digest: Mapped[str | None] = mapped_column(String(64))
    weight_format: Mapped[str | None] = mapped_column(String(16))
    kv_format: Mapped[str | None] = mapped_column(String(16))
    quality: Mapped[dict[str, Any] | None] = mapped_column(Json)  # the verdict on these, as the model had it
    price_version: Mapped[int] = mapped_column(Integer)  # the price book, pinned at creation
    rates: Mapped[dict[str, Any] | None] = mapped_column(
        Json
    )  # {"tier": {...}, "standard": {...}}, pinned when the model is
    models: Mapped[dict[str, Any] | None] = mapped_column(Json)  # instead, if each line has its own: see model_pins.py
    aliases: Mapped[dict[str, Any] | None] = mapped_column(Json)  # the alias table, pinned at creation
    quote_id: Mapped[str | None] = mapped_column(String(64))  # the quote that it was created with, and what that pins:
    plan_limits: Mapped[dict[str, Any] | None] = mapped_column(Json)  # settings of the planner
    template_sha256: Mapped[str | None] = mapped_column(String(64))  # of the model's chat template
    reserved_nanos: Mapped[Nanos]  # all that was ever reserved for it; less the cost, what it holds
    max_cost_nanos: Mapped[int | None] = mapped_column(BigInt)  # the extension `max_cost` of create
    has_budget: Mapped[bool] = mapped_column(Boolean, default=True)  # false: in progress, and waits for money
    wanted_nanos: Mapped[Nanos]  # what it then waits for
    over_budget: Mapped[Count]  # lines that ended as `budget_exceeded`
    on_quota: Mapped[str] = mapped_column(String(8), default="wait")  # wait, or fail, when the quota is full
    has_quota: Mapped[bool] = mapped_column(Boolean, default=True)  # false: in progress, and waits for quota
    est_tokens: Mapped[Count]  # predicted work: the sum of its units'
    sure_tokens: Mapped[Count]  # the share of it that is certain: lines that only max_tokens ends
    est_done_tokens: Mapped[Count]  # the share of it that finished lines were predicted to take
    running_tokens: Mapped[Count]  # generated by saved, unfinished sequences: the sum of its units'
    running_lines: Mapped[Count]  # how many these are
    merged_lines: Mapped[Count]  # by the finalizer that came furthest
    progress_ppm: Mapped[Count]  # the most that was ever true of it, so that nobody sees it fall
    progress_samples: Mapped[list[Any] | None] = mapped_column(Json)  # [milliseconds, tokens of work done by then]

    is_offpeak: Mapped[bool] = mapped_column(Boolean, default=False)  # runs at night, unless its deadline needs the day
    latest_start_ms: Mapped[int | None] = mapped_column(BigInt)  # from then on it is late; the reaper keeps it true
    priority: Mapped[int] = mapped_column(Integer, default=0)  # among the project's own batches: higher runs first
    is_paused: Mapped[bool] = mapped_column(Boolean, default=False)
    pause_reason: Mapped[str | None] = mapped_column(String(255))  # of the operator's pause, or of one for crashes
    is_own_pause: Mapped[bool] = mapped_column(Boolean, default=False)  # its project's, with or without another one
    num_retries: Mapped[Count]  # lines given back for another attempt
    crash_times: Mapped[list[Any] | None] = mapped_column(Json)  # [ms] of engine crashes without progress in between
    poison_times: Mapped[list[Any] | None] = mapped_column(Json)  # [ms] at which a line was found to be poison

    part_seq: Mapped[Count]  # the number of its newest part
    parent_batch_id: Mapped[str | None] = mapped_column(String(64))  # the batch of which it runs lines again
    chosen_lines: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)  # only these (line_set.py), or all
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
    output_s3: Mapped[str | None] = mapped_column(String(1100))  # the prefix in a tenant's store that results go to


class Export(Base):
    """The results of a batch on their way into a tenant's store. `epoch` is the fence, as a unit's."""

    __tablename__ = "exports"
    __table_args__ = (
        Index(
            "ix_exports_due",
            "due_ms",
            sqlite_where=text("state = 'pending'"),
            postgresql_where=text("state = 'pending'"),
        ),
    )

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(8))  # pending, done or failed (given up)
    error: Mapped[str | None] = mapped_column(String(500))  # why the last attempt failed
    num_failures: Mapped[int] = mapped_column(Integer, default=0)
    due_ms: Mapped[Count]
    ended_ms: Mapped[int | None] = mapped_column(BigInt)
    epoch: Mapped[Count]
    owner: Mapped[str | None] = mapped_column(String(128))
    lease_ms: Mapped[Count]
    uploads: Mapped[list[Any]] = mapped_column(Json)  # [[key, upload id]] that attempts have begun over there


class Window(Base):
    """A run of consecutive lines that was planned together; where the next one starts in the input."""

    __tablename__ = "windows"

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    no: Mapped[int] = mapped_column(Integer, primary_key=True)
    first_line: Mapped[Count]  # physical line numbers, 1-based, inclusive
    last_line: Mapped[Count]
    num_lines: Mapped[Count]  # requests: blank lines don't count
    num_rejected: Mapped[Count]
    next_offset: Mapped[Count]  # the byte of the plain file where the next window starts
    input_tokens: Mapped[Count]
    num_prompts: Mapped[Count]  # of its requests
    line_nos_key: Mapped[str] = mapped_column(String(512), default="")  # object: line numbers and custom_ids
    line_nos_sha256: Mapped[str] = mapped_column(String(64), default="")
    is_damaged: Mapped[bool] = mapped_column(Boolean, default=False)  # an object of its plan has to be rebuilt
    reserve_nanos: Mapped[Nanos]  # the most that its lines can cost
    high_nanos: Mapped[Nanos]  # what they cost if their answers are long


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
        Index(
            "ix_units_ready",
            "batch_id",
            "no",
            sqlite_where=text("state = 'ready'"),
            postgresql_where=text("state = 'ready'"),
        ),
        Index(
            "ix_units_suspect",
            "model_digest",
            sqlite_where=text("is_suspect = 1"),
            postgresql_where=text("is_suspect"),
        ),
    )

    id: Mapped[Id]
    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"))
    project_id: Mapped[str] = mapped_column(String(64))
    model_digest: Mapped[str] = mapped_column(String(64))
    model_id: Mapped[str | None] = mapped_column(String(255))  # null: the batch's
    window_no: Mapped[int] = mapped_column(Integer)
    no: Mapped[int] = mapped_column(Integer)  # position in the plan of the batch
    s3_key: Mapped[str] = mapped_column(String(512))
    sha256: Mapped[str] = mapped_column(String(64))
    num_lines: Mapped[int] = mapped_column(Integer)
    est_tokens: Mapped[Count]  # predicted work: uncached input and predicted output tokens
    sure_tokens: Mapped[Count]  # of it, what is certain
    state: Mapped[str] = mapped_column(String(8))  # pending (batch still validating), ready, leased, done, sealed
    epoch: Mapped[Count]
    owner: Mapped[str | None] = mapped_column(String(128))
    lease_ms: Mapped[Count]
    not_before_ms: Mapped[Count]
    ticket_ms: Mapped[Count]  # when a ticket was last sent
    done_bitmap: Mapped[bytes] = mapped_column(LargeBinary)  # bit i: line i of the unit file, in file order
    num_done: Mapped[int] = mapped_column(Integer, default=0)
    granted_nanos: Mapped[Nanos]  # of what its batch holds, what this lease of it may spend in all
    spent_nanos: Mapped[Nanos]  # and what parts under this lease have cost
    is_metered: Mapped[bool] = mapped_column(Boolean, default=False)  # whoever leases it has asked for money
    crash_count: Mapped[int] = mapped_column(Integer, default=0)  # in a row, without progress in between
    is_suspect: Mapped[bool] = mapped_column(Boolean, default=False)  # runs alone until it makes progress
    parent_id: Mapped[str | None] = mapped_column(String(64))  # the unit that this one was split from
    attempts: Mapped[dict[str, Any] | None] = mapped_column(Json)  # failed attempts by bit of the done bitmap
    running_tokens: Mapped[Count]  # generated by the sequences that are saved unfinished
    running_lines: Mapped[Count]
    resume_key: Mapped[str | None] = mapped_column(String(512))  # object: the unfinished sequences that were saved last
    resume_sha256: Mapped[str | None] = mapped_column(String(64))


class Part(Base):
    """An immutable result object. It counts from the commit of this row on, never before; not if it `is_void`."""

    __tablename__ = "parts"
    __table_args__ = (
        Index("ix_parts_window", "batch_id", "window_no"),
        Index("ix_parts_seq", "batch_id", "seq"),
        Index("ix_parts_created", "created_ms"),
        Index("ix_parts_void", "batch_id", sqlite_where=text("is_void"), postgresql_where=text("is_void")),
        Index("ix_parts_poison", "created_ms", sqlite_where=text("is_poison"), postgresql_where=text("is_poison")),
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
    seq: Mapped[int | None] = mapped_column(BigInt)  # in order of commit, from 1 on; null: an older worker added it
    line_nos: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)  # its lines, as line_set.py writes them
    is_void: Mapped[bool] = mapped_column(Boolean, default=False)  # taken back (damaged, released): its lines run again
    is_poison: Mapped[bool] = mapped_column(Boolean, default=False)  # error lines of requests that ended engines
    lines_ok: Mapped[Count]
    lines_err: Mapped[Count]
    num_answers: Mapped[int | None] = mapped_column(BigInt)  # of its ok lines; null: of an older worker, one each
    est_tokens: Mapped[Count]  # what its lines were predicted to take
    input_tokens: Mapped[Count]
    cached_tokens: Mapped[Count]
    output_tokens: Mapped[Count]
    cost_nanos: Mapped[Nanos]
    standard_nanos: Mapped[Nanos]
    over_budget: Mapped[Count]  # of its error lines, those that there was no money for
    created_ms: Mapped[Millis]


class Quote(Base):
    """What a batch would cost, as it was planned and pinned; or, of a sample of its lines, an estimate of that."""

    __tablename__ = "quotes"
    __table_args__ = (Index("ix_quotes_status", "status", "created_ms"),)

    id: Mapped[Id]
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.id"))
    api_key_id: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(8))  # queued, ready or failed
    sample_lines: Mapped[int | None] = mapped_column(Integer)  # of an estimate: how many lines it looks at
    endpoint: Mapped[str] = mapped_column(String(64))
    input_file_id: Mapped[str] = mapped_column(String(64), index=True)
    input_sha256: Mapped[str] = mapped_column(String(64))
    completion_window: Mapped[str] = mapped_column(String(16))
    tier: Mapped[str] = mapped_column(String(32))
    on_invalid: Mapped[str] = mapped_column(String(8))
    created_ms: Mapped[Millis]
    ended_ms: Mapped[int | None] = mapped_column(BigInt)
    expires_ms: Mapped[int | None] = mapped_column(BigInt)

    model_requested: Mapped[str | None] = mapped_column(String(255))
    model_id: Mapped[str | None] = mapped_column(String(255))
    model_digest: Mapped[str | None] = mapped_column(String(64))
    template_sha256: Mapped[str | None] = mapped_column(String(64))
    price_version: Mapped[int] = mapped_column(Integer)
    rates: Mapped[dict[str, Any] | None] = mapped_column(Json)  # as a batch's
    models: Mapped[dict[str, Any] | None] = mapped_column(Json)  # likewise; with lengths and figures of each
    aliases: Mapped[dict[str, Any]] = mapped_column(Json)
    plan_limits: Mapped[dict[str, Any]] = mapped_column(Json)  # settings of the planner that its figures depend on
    lengths: Mapped[dict[str, Any] | None] = mapped_column(Json)  # of the answers that finished lines got

    num_lines: Mapped[Count]
    windows: Mapped[list[Any]] = mapped_column(Json)  # [{last_line, next_offset, key, sha256}] of those planned so far
    found: Mapped[dict[str, Any] | None] = mapped_column(Json)  # the figures
    problems: Mapped[list[Any] | None] = mapped_column(Json)  # of lines that would get an error line: the first ones
    num_rejected: Mapped[Count]  # how many such lines there are
    errors: Mapped[list[Any] | None] = mapped_column(Json)  # why the batch would fail, as a batch shows them
    errors_total: Mapped[Count]
    advice: Mapped[dict[str, Any] | None] = mapped_column(Json)

    plan_epoch: Mapped[Count]
    plan_owner: Mapped[str | None] = mapped_column(String(128))
    plan_lease_ms: Mapped[Count]


class Share(Base):
    """How much of a model a project has had: tokens over weight. The row of project "" is the model's clock."""

    __tablename__ = "shares"

    model_digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    project_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    vtime: Mapped[Count]
    panic_credit: Mapped[Count]  # of the clock: what the panic lane may take


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
    name: Mapped[str | None] = mapped_column(String(128))  # of its place: the same for every start of it
    model_digest: Mapped[str] = mapped_column(String(64), index=True)
    models: Mapped[list[Any] | None] = mapped_column(Json)  # digests of what it serves in turn; null: its one model
    switching_to: Mapped[str | None] = mapped_column(String(64))  # the model that it is loading, which it can't run yet
    beat_ms: Mapped[Count]
    is_draining: Mapped[bool] = mapped_column(Boolean, default=False)
    stats: Mapped[dict[str, Any] | None] = mapped_column(Json)


class ClaimHold(Base):
    """An operator's order that nothing new is claimed: by anybody, of a model, or by a worker (see hold_queries.py)."""

    __tablename__ = "claim_holds"

    target: Mapped[str] = mapped_column(String(160), primary_key=True)
    reason: Mapped[str] = mapped_column(String(255))
    created_ms: Mapped[Millis]


class ServedModel(Base):
    """An operator's order that workers of a name ("": all) serve a model, or don't, whatever their settings say."""

    __tablename__ = "served_models"

    worker: Mapped[str] = mapped_column(String(128), primary_key=True)
    model_digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    is_loaded: Mapped[bool] = mapped_column(Boolean)


class PrefillEngine(Base):
    """A prefill worker that is, or was, alive, and where decode workers of its model find it. It claims nothing."""

    __tablename__ = "prefill_engines"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    model_digest: Mapped[str] = mapped_column(String(64), index=True)
    address: Mapped[str] = mapped_column(String(255))
    beat_ms: Mapped[Count]


class Reconciliation(Base):
    """An ended batch that the reaper has added up again, and how many numbers differed."""

    __tablename__ = "reconciliations"
    __table_args__ = (Index("ix_reconciliations_checked", "checked_ms"),)

    batch_id: Mapped[str] = mapped_column(ForeignKey("batches.id"), primary_key=True)
    checked_ms: Mapped[Millis]
    num_differences: Mapped[Count]
    unreconciled_nanos: Mapped[Nanos]  # how far that amount was off which was off most
    first: Mapped[str | None] = mapped_column(String(500))  # the first difference, in words


class Tally(Base):
    """What the whole deployment has counted under a name, whichever process did, and when it last did."""

    __tablename__ = "tallies"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    num: Mapped[Count]
    at_ms: Mapped[Count]


class Garbage(Base):
    """An object that nobody needs after `not_before_ms`; the reaper deletes it."""

    __tablename__ = "garbage"

    s3_key: Mapped[str] = mapped_column(String(512), primary_key=True)
    not_before_ms: Mapped[Millis]


class CollectionLock(Base):
    """Who holds the collection of garbage (`hold`), or is deleting objects at this moment (`sweep`); and the row that
    whoever wants to do either locks (`mutex`). See collection_queries.py."""

    __tablename__ = "collection_locks"

    holder: Mapped[str] = mapped_column(String(128), primary_key=True)
    kind: Mapped[str] = mapped_column(String(8))
    until_ms: Mapped[Count]
    reason: Mapped[str] = mapped_column(String(255), default="")
