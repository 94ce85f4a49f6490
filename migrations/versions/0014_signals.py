"""What the whole deployment counts for its operator, and how many nano-dollars of a batch didn't add up."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NAMES = ("reaper_ticks", "leases_lost", "lines_quarantined", "parts_damaged")


def upgrade() -> None:
    tallies = op.create_table(
        "tallies",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("num", BIG, nullable=False),
        sa.Column("at_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tallies")),
    )
    op.bulk_insert(tallies, [{"name": name, "num": 0, "at_ms": 0} for name in NAMES])
    op.add_column("reconciliations", sa.Column("unreconciled_nanos", BIG, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("reconciliations", "unreconciled_nanos")
    op.drop_table("tallies")
