"""Pauses of projects apart from those of operators, secrets of stores that are sealed, and the quality of formats."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("batches", sa.Column("is_own_pause", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.execute("UPDATE batches SET is_own_pause = is_paused WHERE pause_reason IS NULL")
    op.add_column("tenant_stores", sa.Column("sealed_secret", sa.String(1024), nullable=True))
    for table in ("models", "batches"):  # what is known of it, of the formats that these are served in or have pinned
        op.add_column(table, sa.Column("quality", JSON, nullable=True))


def downgrade() -> None:
    for table in ("batches", "models"):
        op.drop_column(table, "quality")
    op.drop_column("tenant_stores", "sealed_secret")
    op.drop_column("batches", "is_own_pause")
