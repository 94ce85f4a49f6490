"""What is known of the quality of the formats that a model is served in, and that a batch has pinned."""

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
    for table in ("models", "batches"):
        op.add_column(table, sa.Column("quality", JSON, nullable=True))


def downgrade() -> None:
    for table in ("batches", "models"):
        op.drop_column(table, "quality")
