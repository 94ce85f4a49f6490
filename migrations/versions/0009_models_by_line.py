"""Batches whose lines name their models: units and hours of usage that know theirs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")
KEYS = ("batch_id", "project_id", "api_key_id", "model", "tier", "endpoint", "price_version")


def upgrade() -> None:
    for table in ("batches", "quotes"):
        op.add_column(table, sa.Column("models", JSON, nullable=True))
    op.add_column("units", sa.Column("model_id", sa.String(255), nullable=True))
    _rebuild_hours("batch_id", "hour_ms", "model")


def downgrade() -> None:
    _rebuild_hours("batch_id", "hour_ms")
    op.drop_column("units", "model_id")
    for table in ("quotes", "batches"):
        op.drop_column(table, "models")


def _rebuild_hours(*key: str) -> None:
    """Make the hours of usage again, with this key: they are sums of rows that nobody changes. Of what is no key an
    hour has one row's value, as where the trigger adds to it."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    op.execute("DROP TRIGGER usage_by_hour" + ("" if is_sqlite else " ON usage"))
    op.drop_index("ix_usage_hours_time", "usage_hours")
    op.drop_table("usage_hours")
    op.create_table(
        "usage_hours",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("hour_ms", BIG, nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("api_key_id", sa.String(64), nullable=False),
        sa.Column("tier", sa.String(32), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("price_version", sa.Integer(), nullable=False),
        *(sa.Column(name, BIG, nullable=False) for name in SUMS),
        sa.PrimaryKeyConstraint(*key, name=op.f("pk_usage_hours")),
    )
    op.create_index("ix_usage_hours_time", "usage_hours", ["hour_ms"])
    columns = f"hour_ms, {', '.join(KEYS)}, {', '.join(SUMS)}"
    hour = "{0}created_ms / 3600000 * 3600000"
    kept = [name if name in key else f"MIN({name})" for name in KEYS]
    op.execute(
        f"INSERT INTO usage_hours ({columns}) SELECT {hour.format('')}, {', '.join(kept)},"  # noqa: S608  names of ours
        f" {', '.join(f'SUM({name})' for name in SUMS)}"
        f" FROM usage GROUP BY {', '.join((hour.format(''), *(name for name in KEYS if name in key)))}"
    )
    new = ", ".join(f"NEW.{name}" for name in (*KEYS, *SUMS))
    add = (
        f"INSERT INTO usage_hours ({columns}) VALUES ({hour.format('NEW.')}, {new})"  # noqa: S608  names of ours
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET "
        + ", ".join(f"{name} = usage_hours.{name} + excluded.{name}" for name in SUMS)
    )
    if is_sqlite:
        op.execute(f"CREATE TRIGGER usage_by_hour AFTER INSERT ON usage BEGIN {add}; END")
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION add_usage_to_hour() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {add}; RETURN NULL; END $$"
    )
    op.execute("CREATE TRIGGER usage_by_hour AFTER INSERT ON usage FOR EACH ROW EXECUTE FUNCTION add_usage_to_hour()")
