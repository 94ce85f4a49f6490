"""Retention: who holds the collection of garbage, what is to be wiped out of where, and how long projects keep files.

Files and message batches that were deleted before are wiped as if it were today: their rows keep the true date. They
are a backlog: what is deleted from now on doesn't wait behind them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NOW_MS = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)",
    "postgresql": "CAST(EXTRACT(EPOCH FROM now()) * 1000 AS BIGINT)",
}


def upgrade() -> None:
    locks = op.create_table(
        "collection_locks",
        sa.Column("holder", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("until_ms", BIG, nullable=False),
        sa.Column("reason", sa.String(255), nullable=False),
        sa.PrimaryKeyConstraint("holder", name=op.f("pk_collection_locks")),
    )
    op.bulk_insert(locks, [{"holder": "", "kind": "mutex", "until_ms": 0, "reason": ""}])
    op.create_table(
        "retention_defaults",
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("input_life_s", sa.Integer(), nullable=True),
        sa.Column("output_life_s", sa.Integer(), nullable=True),
        sa.Column("updated_ms", BIG, nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_retention_defaults_project_id_projects")
        ),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_retention_defaults")),
    )
    op.create_table(
        "purges",
        sa.Column("subject_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("deleted_ms", BIG, nullable=False),
        sa.Column("due_ms", BIG, nullable=False),
        sa.Column("swept_ms", BIG, nullable=True),
        sa.Column("purged_ms", BIG, nullable=True),
        sa.Column("num_failures", sa.Integer(), nullable=False),
        sa.Column("is_backlog", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("subject_id", "kind", name=op.f("pk_purges")),
    )
    unfinished = sa.text("purged_ms IS NULL")
    op.create_index(
        "ix_purges_due", "purges", ["is_backlog", "due_ms"], sqlite_where=unfinished, postgresql_where=unfinished
    )
    there = sa.text("deleted_ms IS NULL")
    op.create_index("ix_files_expiry", "files", ["expires_ms"], sqlite_where=there, postgresql_where=there)
    op.create_index("ix_quotes_input_file_id", "quotes", ["input_file_id"])
    op.create_index("ix_uploads_file_id", "uploads", ["file_id"])
    columns = "(subject_id, kind, deleted_ms, due_ms, num_failures, is_backlog)"
    now = NOW_MS[op.get_bind().dialect.name]
    for table, kind in (("files", "file"), ("batches", "batch")):
        op.execute(
            f"INSERT INTO purges {columns} SELECT id, '{kind}', {now}, {now}, 0, TRUE"  # noqa: S608
            f" FROM {table} WHERE deleted_ms IS NOT NULL"
        )


def downgrade() -> None:
    op.drop_index("ix_files_expiry", "files")
    op.drop_index("ix_uploads_file_id", "uploads")
    op.drop_index("ix_quotes_input_file_id", "quotes")
    op.drop_table("purges")
    op.drop_table("retention_defaults")
    op.drop_table("collection_locks")
