"""The first tables: projects and keys, files, models, batches and their pieces, prices, usage and the ledger."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "garbage",
        sa.Column("s3_key", sa.String(length=512), nullable=False),
        sa.Column("not_before_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("s3_key", name=op.f("pk_garbage")),
    )
    op.create_table(
        "ledger_transactions",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("key", sa.String(length=160), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("part_id", sa.String(length=64), nullable=True),
        sa.Column("price_version", sa.Integer(), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_transactions")),
        sa.UniqueConstraint("key", name=op.f("uq_ledger_transactions_key")),
    )
    op.create_index(op.f("ix_ledger_transactions_batch_id"), "ledger_transactions", ["batch_id"], unique=False)
    op.create_table(
        "models",
        sa.Column("id", sa.String(length=255), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("path", sa.String(length=1024), nullable=False),
        sa.Column("alias_of", sa.String(length=255), nullable=True),
        sa.Column("context_tokens", sa.Integer(), nullable=False),
        sa.Column("weight_format", sa.String(length=16), nullable=False),
        sa.Column("kv_format", sa.String(length=16), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_models")),
    )
    op.create_index(op.f("ix_models_digest"), "models", ["digest"], unique=False)
    op.create_table(
        "prices",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("tier", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("nanos_per_mtok", BIG, nullable=False),
        sa.Column("effective_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prices")),
        sa.UniqueConstraint("version", "model", "tier", "kind", name=op.f("uq_prices_version_model_tier_kind")),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("salt", sa.String(length=64), nullable=False),
        sa.Column("weight", sa.Integer(), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
    )
    op.create_table(
        "usage",
        sa.Column("part_id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("api_key_id", sa.String(length=64), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("tier", sa.String(length=32), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("requests", BIG, nullable=False),
        sa.Column("input_tokens", BIG, nullable=False),
        sa.Column("cached_tokens", BIG, nullable=False),
        sa.Column("output_tokens", BIG, nullable=False),
        sa.Column("cost_nanos", BIG, nullable=False),
        sa.PrimaryKeyConstraint("part_id", name=op.f("pk_usage")),
    )
    op.create_index(op.f("ix_usage_batch_id"), "usage", ["batch_id"], unique=False)
    op.create_index("ix_usage_buckets", "usage", ["project_id", "created_ms"], unique=False)
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("model_digest", sa.String(length=64), nullable=False),
        sa.Column("beat_ms", BIG, nullable=False),
        sa.Column("is_draining", sa.Boolean(), nullable=False),
        sa.Column("stats", JSON, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_index(op.f("ix_workers_model_digest"), "workers", ["model_digest"], unique=False)
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("is_admin", sa.Boolean(), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("revoked_ms", BIG, nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
    )
    op.create_index(op.f("ix_api_keys_project_id"), "api_keys", ["project_id"], unique=False)
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("api_key_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("input_file_id", sa.String(length=64), nullable=False),
        sa.Column("completion_window", sa.String(length=16), nullable=False),
        sa.Column("tier", sa.String(length=32), nullable=False),
        sa.Column("on_invalid", sa.String(length=8), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=True),
        sa.Column("metadata", JSON, nullable=True),
        sa.Column("output_expires_after_s", sa.Integer(), nullable=True),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("why", sa.String(length=16), nullable=True),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("expires_ms", BIG, nullable=False),
        sa.Column("in_progress_ms", BIG, nullable=True),
        sa.Column("finalizing_ms", BIG, nullable=True),
        sa.Column("cancelling_ms", BIG, nullable=True),
        sa.Column("ended_ms", BIG, nullable=True),
        sa.Column("errors", JSON, nullable=True),
        sa.Column("errors_total", BIG, nullable=False),
        sa.Column("model_requested", sa.String(length=255), nullable=True),
        sa.Column("model_id", sa.String(length=255), nullable=True),
        sa.Column("model_digest", sa.String(length=64), nullable=True),
        sa.Column("weight_format", sa.String(length=16), nullable=True),
        sa.Column("kv_format", sa.String(length=16), nullable=True),
        sa.Column("price_version", sa.Integer(), nullable=False),
        sa.Column("rates", JSON, nullable=True),
        sa.Column("aliases", JSON, nullable=True),
        sa.Column("reserved_nanos", BIG, nullable=False),
        sa.Column("total", BIG, nullable=False),
        sa.Column("completed", BIG, nullable=False),
        sa.Column("failed", BIG, nullable=False),
        sa.Column("input_tokens", BIG, nullable=False),
        sa.Column("cached_tokens", BIG, nullable=False),
        sa.Column("output_tokens", BIG, nullable=False),
        sa.Column("cost_nanos", BIG, nullable=False),
        sa.Column("standard_nanos", BIG, nullable=False),
        sa.Column("plan_epoch", BIG, nullable=False),
        sa.Column("plan_owner", sa.String(length=128), nullable=True),
        sa.Column("plan_lease_ms", BIG, nullable=False),
        sa.Column("fin_epoch", BIG, nullable=False),
        sa.Column("fin_owner", sa.String(length=128), nullable=True),
        sa.Column("fin_lease_ms", BIG, nullable=False),
        sa.Column("cancel_seq", BIG, nullable=False),
        sa.Column("output_file_id", sa.String(length=64), nullable=True),
        sa.Column("error_file_id", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_batches_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
    )
    op.create_index(op.f("ix_batches_input_file_id"), "batches", ["input_file_id"], unique=False)
    op.create_index("ix_batches_listing", "batches", ["project_id", "created_ms", "id"], unique=False)
    op.create_index("ix_batches_status", "batches", ["status", "expires_ms"], unique=False)
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("filename", sa.String(length=255), nullable=False),
        sa.Column("s3_key", sa.String(length=512), nullable=False),
        sa.Column("etag", sa.String(length=128), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("expires_ms", BIG, nullable=True),
        sa.Column("deleted_ms", BIG, nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_files_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
        sa.UniqueConstraint("s3_key", name=op.f("uq_files_s3_key")),
    )
    op.create_index("ix_files_listing", "files", ["project_id", "created_ms", "id"], unique=False)
    op.create_table(
        "ledger_entries",
        sa.Column("id", BIG, autoincrement=True, nullable=False),
        sa.Column("transaction_id", BIG, nullable=False),
        sa.Column("account", sa.String(length=96), nullable=False),
        sa.Column("amount_nanos", BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["transaction_id"],
            ["ledger_transactions.id"],
            name=op.f("fk_ledger_entries_transaction_id_ledger_transactions"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_entries")),
    )
    op.create_index(op.f("ix_ledger_entries_account"), "ledger_entries", ["account"], unique=False)
    op.create_index(op.f("ix_ledger_entries_transaction_id"), "ledger_entries", ["transaction_id"], unique=False)
    op.create_table(
        "parts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("unit_id", sa.String(length=64), nullable=True),
        sa.Column("window_no", sa.Integer(), nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("s3_key", sa.String(length=512), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("bitmap", sa.LargeBinary(), nullable=True),
        sa.Column("lines_ok", BIG, nullable=False),
        sa.Column("lines_err", BIG, nullable=False),
        sa.Column("input_tokens", BIG, nullable=False),
        sa.Column("cached_tokens", BIG, nullable=False),
        sa.Column("output_tokens", BIG, nullable=False),
        sa.Column("cost_nanos", BIG, nullable=False),
        sa.Column("standard_nanos", BIG, nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_parts_batch_id_batches")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_parts")),
        sa.UniqueConstraint("s3_key", name=op.f("uq_parts_s3_key")),
    )
    op.create_index(op.f("ix_parts_unit_id"), "parts", ["unit_id"], unique=False)
    op.create_index("ix_parts_window", "parts", ["batch_id", "window_no"], unique=False)
    op.create_table(
        "segments",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("fin_epoch", sa.Integer(), nullable=False),
        sa.Column("window_no", sa.Integer(), nullable=False),
        sa.Column("state", JSON, nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_segments_batch_id_batches")),
        sa.PrimaryKeyConstraint("batch_id", "fin_epoch", "window_no", name=op.f("pk_segments")),
    )
    op.create_table(
        "units",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=64), nullable=False),
        sa.Column("model_digest", sa.String(length=64), nullable=False),
        sa.Column("window_no", sa.Integer(), nullable=False),
        sa.Column("no", sa.Integer(), nullable=False),
        sa.Column("s3_key", sa.String(length=512), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("num_lines", sa.Integer(), nullable=False),
        sa.Column("est_tokens", BIG, nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=True),
        sa.Column("lease_ms", BIG, nullable=False),
        sa.Column("not_before_ms", BIG, nullable=False),
        sa.Column("ticket_ms", BIG, nullable=False),
        sa.Column("done_bitmap", sa.LargeBinary(), nullable=False),
        sa.Column("num_done", sa.Integer(), nullable=False),
        sa.Column("crash_count", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_units_batch_id_batches")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_units")),
        sa.UniqueConstraint("batch_id", "no", name=op.f("uq_units_batch_id_no")),
    )
    op.create_index(
        "ix_units_claim",
        "units",
        ["model_digest", "not_before_ms"],
        unique=False,
        sqlite_where=sa.text("state = 'ready'"),
        postgresql_where=sa.text("state = 'ready'"),
    )
    op.create_index(
        "ix_units_lease",
        "units",
        ["lease_ms"],
        unique=False,
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_table(
        "windows",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("no", sa.Integer(), nullable=False),
        sa.Column("first_line", BIG, nullable=False),
        sa.Column("last_line", BIG, nullable=False),
        sa.Column("num_lines", BIG, nullable=False),
        sa.Column("num_rejected", BIG, nullable=False),
        sa.Column("next_offset", BIG, nullable=False),
        sa.Column("input_tokens", BIG, nullable=False),
        sa.Column("line_nos_key", sa.String(length=512), nullable=False),
        sa.Column("reserve_nanos", BIG, nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_windows_batch_id_batches")),
        sa.PrimaryKeyConstraint("batch_id", "no", name=op.f("pk_windows")),
    )


def downgrade() -> None:
    for table in (
        "windows",
        "units",
        "segments",
        "parts",
        "ledger_entries",
        "files",
        "batches",
        "api_keys",
        "workers",
        "usage",
        "projects",
        "prices",
        "models",
        "ledger_transactions",
        "garbage",
    ):
        op.drop_table(table)
