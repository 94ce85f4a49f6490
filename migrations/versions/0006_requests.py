"""What requests of every kind need: endpoints, uploads, retries, stores of tenants."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    _results()
    _uploads()
    _messages()
    _answers()


def _results() -> None:
    """Parts in order of commit and the lines that they hold; batches that run lines of another one again."""
    op.add_column("batches", sa.Column("part_seq", BIG, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("parent_batch_id", sa.String(64), nullable=True))
    op.add_column("batches", sa.Column("chosen_lines", sa.LargeBinary(), nullable=True))
    op.add_column("parts", sa.Column("seq", BIG, nullable=True))
    op.add_column("parts", sa.Column("line_nos", sa.LargeBinary(), nullable=True))
    op.create_index("ix_parts_seq", "parts", ["batch_id", "seq"])
    op.execute(
        "UPDATE parts SET seq = n.no FROM (SELECT id, ROW_NUMBER() OVER (PARTITION BY batch_id ORDER BY created_ms, id)"
        " AS no FROM parts) AS n WHERE parts.id = n.id"
    )
    op.execute("UPDATE batches SET part_seq = (SELECT COUNT(*) FROM parts WHERE parts.batch_id = batches.id)")


def _uploads() -> None:
    """Files that come in parts."""
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("file_life_s", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("expires_ms", BIG, nullable=False),
        sa.Column("part_ids", JSON, nullable=True),
        sa.Column("file_id", sa.String(64), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_uploads_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(
        "ix_uploads_pending",
        "uploads",
        ["expires_ms"],
        sqlite_where=sa.text("status = 'pending'"),
        postgresql_where=sa.text("status = 'pending'"),
    )
    op.create_table(
        "upload_parts",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("upload_id", sa.String(64), nullable=False),
        sa.Column("s3_key", sa.String(512), nullable=False),
        sa.Column("etag", sa.String(128), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.ForeignKeyConstraint(["upload_id"], ["uploads.id"], name=op.f("fk_upload_parts_upload_id_uploads")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_upload_parts")),
        sa.UniqueConstraint("s3_key", name=op.f("uq_upload_parts_s3_key")),
    )
    op.create_index(op.f("ix_upload_parts_upload_id"), "upload_parts", ["upload_id"])


def _messages() -> None:
    """Batches that know the number of their requests from the start, and that can be deleted."""
    op.add_column("batches", sa.Column("num_requests", BIG, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("deleted_ms", BIG, nullable=True))


def _answers() -> None:
    """Parts that know how many answers their lines got."""
    op.add_column("parts", sa.Column("num_answers", BIG, nullable=True))


def downgrade() -> None:
    op.drop_column("parts", "num_answers")
    for column in ("deleted_ms", "num_requests"):
        op.drop_column("batches", column)
    for table in ("upload_parts", "uploads"):
        op.drop_table(table)
    op.drop_index("ix_parts_seq", "parts")
    for table, columns in (
        ("parts", ("line_nos", "seq")),
        ("batches", ("chosen_lines", "parent_batch_id", "part_seq")),
    ):
        for column in columns:
            op.drop_column(table, column)
