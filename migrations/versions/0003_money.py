"""What money needs: balances, limits, a ledger that takes payments and lets nothing be changed.

Every column has a server default, so that rows of running batches stay valid and old processes go on inserting.
"""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")

USAGE_SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")
APPEND_ONLY = ("ledger_transactions", "ledger_entries", "usage", "prices")


def upgrade() -> None:
    # the ledger: payments and goodwill have a reason and whoever gave it, and need no batch
    with op.batch_alter_table("ledger_transactions") as table:
        table.alter_column("batch_id", existing_type=sa.String(64), nullable=True)
        table.add_column(sa.Column("reason", sa.String(255), nullable=True))
        table.add_column(sa.Column("actor", sa.String(64), nullable=True))
    op.create_index("ix_ledger_transactions_statement", "ledger_transactions", ["project_id", "created_ms"])
    # what a project has, holds and spent this month: the ledger's sums, kept so that limits needn't add it up
    op.create_table(
        "balances",
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("available_nanos", BIG, nullable=False),
        sa.Column("reserved_nanos", BIG, nullable=False),
        sa.Column("month", sa.Integer(), nullable=False),
        sa.Column("month_nanos", BIG, nullable=False),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_balances")),
    )
    now = datetime.now(UTC)
    began_ms = round(datetime(now.year, now.month, 1, tzinfo=UTC).timestamp() * 1000)
    filled = (
        "INSERT INTO balances (project_id, available_nanos, reserved_nanos, month, month_nanos)"
        " SELECT t.project_id,"
        " SUM(CASE WHEN e.account LIKE 'available:%' THEN e.amount_nanos ELSE 0 END),"
        " SUM(CASE WHEN e.account LIKE 'reserved:%' THEN e.amount_nanos ELSE 0 END), :month,"
        " SUM(CASE WHEN e.account = 'revenue' AND t.created_ms >= :began_ms THEN e.amount_nanos ELSE 0 END)"
        " FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id GROUP BY t.project_id"
    )
    op.execute(sa.text(filled).bindparams(month=now.year * 12 + now.month - 1, began_ms=began_ms))
    # limits
    op.add_column("projects", sa.Column("budget_nanos", BIG, nullable=True))
    op.add_column("projects", sa.Column("is_prepaid", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("batches", sa.Column("max_cost_nanos", BIG, nullable=True))
    op.add_column("batches", sa.Column("has_budget", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("batches", sa.Column("wanted_nanos", BIG, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("over_budget", BIG, nullable=False, server_default="0"))
    op.add_column("windows", sa.Column("high_nanos", BIG, nullable=False, server_default="0"))
    op.add_column("units", sa.Column("granted_nanos", BIG, nullable=False, server_default="0"))
    op.add_column("parts", sa.Column("over_budget", BIG, nullable=False, server_default="0"))

    # quotes
    op.add_column("batches", sa.Column("quote_id", sa.String(64), nullable=True))
    op.add_column("batches", sa.Column("plan_limits", JSON, nullable=True))
    op.add_column("batches", sa.Column("template_sha256", sa.String(64), nullable=True))
    op.create_table(
        "quotes",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("api_key_id", sa.String(64), nullable=False),
        sa.Column("status", sa.String(8), nullable=False),
        sa.Column("sample_lines", sa.Integer(), nullable=True),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("input_sha256", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(16), nullable=False),
        sa.Column("tier", sa.String(32), nullable=False),
        sa.Column("on_invalid", sa.String(8), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("ended_ms", BIG, nullable=True),
        sa.Column("expires_ms", BIG, nullable=True),
        sa.Column("model_requested", sa.String(255), nullable=True),
        sa.Column("model_id", sa.String(255), nullable=True),
        sa.Column("model_digest", sa.String(64), nullable=True),
        sa.Column("template_sha256", sa.String(64), nullable=True),
        sa.Column("price_version", sa.Integer(), nullable=False),
        sa.Column("rates", JSON, nullable=True),
        sa.Column("aliases", JSON, nullable=False),
        sa.Column("plan_limits", JSON, nullable=False),
        sa.Column("lengths", JSON, nullable=True),
        sa.Column("num_lines", BIG, nullable=False),
        sa.Column("windows", JSON, nullable=False),
        sa.Column("found", JSON, nullable=True),
        sa.Column("problems", JSON, nullable=True),
        sa.Column("num_rejected", BIG, nullable=False),
        sa.Column("errors", JSON, nullable=True),
        sa.Column("errors_total", BIG, nullable=False),
        sa.Column("advice", JSON, nullable=True),
        sa.Column("plan_epoch", BIG, nullable=False),
        sa.Column("plan_owner", sa.String(128), nullable=True),
        sa.Column("plan_lease_ms", BIG, nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_quotes_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_quotes")),
    )
    op.create_index("ix_quotes_status", "quotes", ["status", "created_ms"])
    _count_usage_by_hour()

    # last of all, when the tables are what they shall be: SQLite copies a table to alter it
    for table_name in APPEND_ONLY:
        _refuse_changes(table_name)


def _count_usage_by_hour() -> None:
    """Usage rows know their endpoint and prices, and a trigger adds each to its batch's hour: whoever inserts it."""
    with op.batch_alter_table("usage") as usage:
        usage.add_column(sa.Column("endpoint", sa.String(64), nullable=False, server_default="/v1/chat/completions"))
        usage.add_column(sa.Column("price_version", sa.Integer(), nullable=False, server_default="0"))
        usage.create_check_constraint(
            op.f("ck_usage_cached_within_input"),
            "cached_tokens BETWEEN 0 AND input_tokens OR cached_tokens BETWEEN input_tokens AND 0",
        )
    op.create_index("ix_usage_created", "usage", ["created_ms"])
    op.execute(
        "UPDATE usage SET"
        " endpoint = COALESCE((SELECT b.endpoint FROM batches b WHERE b.id = usage.batch_id), endpoint),"
        " price_version = COALESCE((SELECT b.price_version FROM batches b WHERE b.id = usage.batch_id), 0)"
    )
    op.create_table(
        "usage_hours",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("hour_ms", BIG, nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("api_key_id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("tier", sa.String(32), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("price_version", sa.Integer(), nullable=False),
        *(sa.Column(name, BIG, nullable=False) for name in USAGE_SUMS),
        sa.PrimaryKeyConstraint("batch_id", "hour_ms", name=op.f("pk_usage_hours")),
    )
    op.create_index("ix_usage_hours_time", "usage_hours", ["hour_ms"])
    keys = ("batch_id", "project_id", "api_key_id", "model", "tier", "endpoint", "price_version")
    columns = f"hour_ms, {', '.join(keys)}, {', '.join(USAGE_SUMS)}"
    hour = "{0}created_ms / 3600000 * 3600000"
    op.execute(
        f"INSERT INTO usage_hours ({columns}) SELECT {hour.format('')}, {', '.join(keys)},"
        f" {', '.join(f'SUM({name})' for name in USAGE_SUMS)}"
        f" FROM usage GROUP BY {hour.format('')}, {', '.join(keys)}"
    )
    new = ", ".join(f"NEW.{name}" for name in (*keys, *USAGE_SUMS))
    add = (
        f"INSERT INTO usage_hours ({columns}) VALUES ({hour.format('NEW.')}, {new})"
        " ON CONFLICT (batch_id, hour_ms) DO UPDATE SET "
        + ", ".join(f"{name} = usage_hours.{name} + excluded.{name}" for name in USAGE_SUMS)
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"CREATE TRIGGER usage_by_hour AFTER INSERT ON usage BEGIN {add}; END")
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION add_usage_to_hour() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {add}; RETURN NULL; END $$"
    )
    op.execute("CREATE TRIGGER usage_by_hour AFTER INSERT ON usage FOR EACH ROW EXECUTE FUNCTION add_usage_to_hour()")


def _refuse_changes(table: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table}"
                f" BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation'; END $$"
    )
    for name, verb, each in (("change", "UPDATE OR DELETE", "ROW"), ("truncate", "TRUNCATE", "STATEMENT")):
        op.execute(
            f"CREATE TRIGGER {table}_no_{name} BEFORE {verb} ON {table}"
            f" FOR EACH {each} EXECUTE FUNCTION refuse_change()"
        )


def _allow_changes(table: str) -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    for name in ("update", "delete") if is_sqlite else ("change", "truncate"):
        op.execute(f"DROP TRIGGER {table}_no_{name}" + ("" if is_sqlite else f" ON {table}"))


def downgrade() -> None:
    for table_name in APPEND_ONLY:
        _allow_changes(table_name)
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION refuse_change()")
    op.execute("DROP TRIGGER usage_by_hour" + ("" if op.get_bind().dialect.name == "sqlite" else " ON usage"))
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION add_usage_to_hour()")
    op.drop_table("usage_hours")
    op.drop_index("ix_usage_created", "usage")
    with op.batch_alter_table("usage") as usage:
        usage.drop_constraint(op.f("ck_usage_cached_within_input"), type_="check")
        usage.drop_column("price_version")
        usage.drop_column("endpoint")
    op.drop_table("quotes")
    for column in ("template_sha256", "plan_limits", "quote_id"):
        op.drop_column("batches", column)
    op.drop_column("parts", "over_budget")
    op.drop_column("units", "granted_nanos")
    op.drop_column("windows", "high_nanos")
    for column in ("over_budget", "wanted_nanos", "has_budget", "max_cost_nanos"):
        op.drop_column("batches", column)
    op.drop_column("projects", "is_prepaid")
    op.drop_column("projects", "budget_nanos")
    op.drop_table("balances")
    op.drop_index("ix_ledger_transactions_statement", "ledger_transactions")
    op.execute("DELETE FROM ledger_entries WHERE transaction_id IN"
               " (SELECT id FROM ledger_transactions WHERE batch_id IS NULL)")  # fmt: skip
    op.execute("DELETE FROM ledger_transactions WHERE batch_id IS NULL")
    with op.batch_alter_table("ledger_transactions") as table:
        table.drop_column("actor")
        table.drop_column("reason")
        table.alter_column("batch_id", existing_type=sa.String(64), nullable=False)
