"""What inputs from, and results for, the stores of tenants need."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "tenant_stores",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("bucket", sa.String(63), nullable=False),
        sa.Column("prefix", sa.String(1024), nullable=False),
        sa.Column("endpoint", sa.String(2048), nullable=True),
        sa.Column("region", sa.String(64), nullable=False),
        sa.Column("access_key", sa.String(256), nullable=False),
        sa.Column("secret_key", sa.String(256), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("updated_ms", BIG, nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_tenant_stores_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenant_stores")),
        sa.UniqueConstraint("project_id", "bucket", "prefix", name=op.f("uq_tenant_stores_project_id_bucket_prefix")),
    )
    op.add_column("files", sa.Column("source_uri", sa.String(1100), nullable=True))
    op.add_column("files", sa.Column("source_etag", sa.String(128), nullable=True))
    op.add_column("files", sa.Column("num_failures", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("files", sa.Column("source_error", sa.String(2048), nullable=True))
    op.create_index(
        "ix_files_source",
        "files",
        ["project_id", "source_etag"],
        sqlite_where=sa.text("source_uri IS NOT NULL"),
        postgresql_where=sa.text("source_uri IS NOT NULL"),
    )
    op.add_column("batches", sa.Column("output_s3", sa.String(1100), nullable=True))
    op.create_table(
        "exports",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("error", sa.String(500), nullable=True),
        sa.Column("num_failures", sa.Integer(), nullable=False),
        sa.Column("due_ms", BIG, nullable=False),
        sa.Column("ended_ms", BIG, nullable=True),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("owner", sa.String(128), nullable=True),
        sa.Column("lease_ms", BIG, nullable=False),
        sa.Column("uploads", JSON, nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_exports_batch_id_batches")),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_exports")),
    )
    op.create_index(
        "ix_exports_due",
        "exports",
        ["due_ms"],
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )


def downgrade() -> None:
    op.drop_table("exports")
    op.drop_column("batches", "output_s3")
    op.drop_index("ix_files_source", "files")
    for column in ("source_error", "num_failures", "source_etag", "source_uri"):
        op.drop_column("files", column)
    op.drop_table("tenant_stores")
