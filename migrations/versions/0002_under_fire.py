"""What the service under fire needs: marks of damaged objects, predicted work, unfinished sequences.

Every column has a server default, so that rows of running batches stay valid and old processes go on inserting.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")

CLAIM_INDICES = (
    ("ix_units_ready", "units", ["batch_id", "no"], "state = 'ready'"),
    ("ix_units_suspect", "units", ["model_digest"], "is_suspect"),
    ("ix_parts_created", "parts", ["created_ms"], None),
)


def upgrade() -> None:
    # damaged objects
    op.add_column("parts", sa.Column("is_void", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index(
        "ix_parts_void", "parts", ["batch_id"], sqlite_where=sa.text("is_void"), postgresql_where=sa.text("is_void")
    )
    op.add_column("windows", sa.Column("is_damaged", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("windows", sa.Column("line_nos_sha256", sa.String(64), nullable=False, server_default=""))
    # predicted work
    op.add_column("batches", sa.Column("est_tokens", BIG, nullable=False, server_default="0"))
    # progress
    for column in ("sure_tokens", "est_done_tokens", "running_tokens", "running_lines", "merged_lines", "progress_ppm"):
        op.add_column("batches", sa.Column(column, BIG, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("progress_samples", JSON, nullable=True))
    op.add_column("parts", sa.Column("est_tokens", BIG, nullable=False, server_default="0"))
    op.add_column("units", sa.Column("sure_tokens", BIG, nullable=False, server_default="0"))
    op.add_column("units", sa.Column("running_tokens", BIG, nullable=False, server_default="0"))
    op.add_column("units", sa.Column("running_lines", BIG, nullable=False, server_default="0"))
    # unfinished sequences
    op.add_column("units", sa.Column("resume_key", sa.String(512), nullable=True))
    op.add_column("units", sa.Column("resume_sha256", sa.String(64), nullable=True))
    # quota in tokens of a project's unfinished batches; null: the setting's
    op.add_column("projects", sa.Column("quota_tokens", BIG, nullable=True))
    op.add_column("batches", sa.Column("has_quota", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("batches", sa.Column("on_quota", sa.String(8), nullable=False, server_default="wait"))
    # answers to calls with an Idempotency-Key
    op.create_table(
        "idempotent_answers",
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_idempotent_answers_project_id_projects")
        ),
        sa.PrimaryKeyConstraint("project_id", "key", name=op.f("pk_idempotent_answers")),
    )
    op.create_index(op.f("ix_idempotent_answers_created_ms"), "idempotent_answers", ["created_ms"])

    # claims: the night, pauses, priority, deadlines, shares of projects
    for column in ("is_offpeak", "is_paused"):
        op.add_column("batches", sa.Column(column, sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("batches", sa.Column("pause_reason", sa.String(255), nullable=True))
    op.add_column("batches", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("latest_start_ms", BIG, nullable=True))
    op.create_table(
        "shares",
        sa.Column("model_digest", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("vtime", BIG, nullable=False),
        sa.Column("panic_credit", BIG, nullable=False),
        sa.PrimaryKeyConstraint("model_digest", "project_id", name=op.f("pk_shares")),
    )
    # retries, crashes and poison
    op.add_column("batches", sa.Column("num_retries", BIG, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("crash_times", JSON, nullable=True))
    op.add_column("batches", sa.Column("poison_times", JSON, nullable=True))
    op.add_column("units", sa.Column("attempts", JSON, nullable=True))
    op.add_column("units", sa.Column("parent_id", sa.String(64), nullable=True))
    op.add_column("units", sa.Column("is_suspect", sa.Boolean(), nullable=False, server_default=sa.false()))
    for name, table, columns, condition in CLAIM_INDICES:
        where = sa.text(condition) if condition else None
        number = sa.text("is_suspect = 1") if condition == "is_suspect" else where
        op.create_index(name, table, columns, sqlite_where=number, postgresql_where=where)


def downgrade() -> None:
    for name, table, _, _ in CLAIM_INDICES:
        op.drop_index(name, table)
    for column in ("is_suspect", "parent_id", "attempts"):
        op.drop_column("units", column)
    op.drop_table("shares")
    for column in (
        "poison_times",
        "crash_times",
        "num_retries",
        "latest_start_ms",
        "priority",
        "pause_reason",
        "is_paused",
        "is_offpeak",
    ):
        op.drop_column("batches", column)
    op.drop_table("idempotent_answers")
    op.drop_column("batches", "on_quota")
    op.drop_column("batches", "has_quota")
    op.drop_column("projects", "quota_tokens")
    op.drop_column("units", "resume_sha256")
    op.drop_column("units", "resume_key")
    op.drop_column("units", "running_lines")
    op.drop_column("units", "running_tokens")
    op.drop_column("units", "sure_tokens")
    op.drop_column("parts", "est_tokens")
    op.drop_column("batches", "progress_samples")
    for column in ("progress_ppm", "merged_lines", "running_lines", "running_tokens", "est_done_tokens", "sure_tokens"):
        op.drop_column("batches", column)
    op.drop_column("batches", "est_tokens")
    op.drop_column("windows", "line_nos_sha256")
    op.drop_column("windows", "is_damaged")
    op.drop_index("ix_parts_void", "parts")
    op.drop_column("parts", "is_void")
