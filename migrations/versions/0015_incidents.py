"""What an operator does about incidents: holds on claims, poisoned parts, and which models workers serve in turn."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")


def upgrade() -> None:
    op.create_table(
        "claim_holds",
        sa.Column("target", sa.String(160), nullable=False),
        sa.Column("reason", sa.String(255), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("target", name=op.f("pk_claim_holds")),
    )
    op.create_table(
        "served_models",
        sa.Column("worker", sa.String(128), nullable=False),
        sa.Column("model_digest", sa.String(64), nullable=False),
        sa.Column("is_loaded", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("worker", "model_digest", name=op.f("pk_served_models")),
    )
    op.add_column("workers", sa.Column("name", sa.String(128), nullable=True))
    op.add_column("workers", sa.Column("models", JSON, nullable=True))
    op.add_column("workers", sa.Column("switching_to", sa.String(64), nullable=True))
    op.add_column("models", sa.Column("swap_ms", BIG, nullable=True))
    op.add_column("models", sa.Column("served_ms", BIG, nullable=False, server_default="0"))
    op.add_column("parts", sa.Column("is_poison", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index(
        "ix_parts_poison",
        "parts",
        ["created_ms"],
        sqlite_where=sa.text("is_poison"),
        postgresql_where=sa.text("is_poison"),
    )


def downgrade() -> None:
    op.drop_index("ix_parts_poison", table_name="parts")
    op.drop_column("parts", "is_poison")
    op.drop_column("models", "served_ms")
    op.drop_column("models", "swap_ms")
    op.drop_column("workers", "switching_to")
    op.drop_column("workers", "models")
    op.drop_column("workers", "name")
    op.drop_table("served_models")
    op.drop_table("claim_holds")
