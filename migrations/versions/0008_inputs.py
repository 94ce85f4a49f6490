"""What reading odd inputs leaves, and batches whose lines name several models."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.add_column("batches", sa.Column("warnings", JSON, nullable=True))
    op.add_column("windows", sa.Column("num_prompts", BIG, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("windows", "num_prompts")
    op.drop_column("batches", "warnings")
