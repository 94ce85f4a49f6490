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
    _add_entries_to_balances()
    # limits
    op.add_column("projects", sa.Column("budget_nanos", BIG, nullable=True))
    op.add_column("projects", sa.Column("is_prepaid", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("batches", sa.Column("max_cost_nanos", BIG, nullable=True))
    op.add_column("batches", sa.Column("has_budget", sa.Boolean(), nullable=False, server_default=sa.true()))
    op.add_column("batches", sa.Column("wanted_nanos", BIG, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("over_budget", BIG, nullable=False, server_default="0"))
    op.add_column("windows", sa.Column("high_nanos", BIG, nullable=False, server_default="0"))
    for column in ("granted_nanos", "spent_nanos"):
        op.add_column("units", sa.Column(column, BIG, nullable=False, server_default="0"))
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

    _create_invoices()

    # what the reaper has added up again
    op.create_table(
        "reconciliations",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("checked_ms", BIG, nullable=False),
        sa.Column("num_differences", BIG, nullable=False),
        sa.Column("first", sa.String(500), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_reconciliations_batch_id_batches")),
        sa.PrimaryKeyConstraint("batch_id", name=op.f("pk_reconciliations")),
    )
    op.create_index("ix_reconciliations_checked", "reconciliations", ["checked_ms"])

    # last of all, when the tables are what they shall be: SQLite copies a table to alter it
    for table_name in APPEND_ONLY:
        _refuse_changes(table_name)


def _add_entries_to_balances() -> None:
    """A trigger adds every entry to the balance of the project in its account's name: whoever inserts it.

    That needn't be the transaction's project: an invoice can be paid by another.
    """
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    if is_sqlite:
        year, month = (
            f"CAST(strftime('{form}', t.created_ms / 1000, 'unixepoch') AS INTEGER)" for form in ("%Y", "%m")
        )
    else:
        moment = "to_timestamp(t.created_ms / 1000) AT TIME ZONE 'UTC'"
        year, month = (f"CAST(EXTRACT({field} FROM {moment}) AS INTEGER)" for field in ("YEAR", "MONTH"))
    amounts = ", ".join(
        f"CASE WHEN NEW.account LIKE '{account}' THEN NEW.amount_nanos ELSE 0 END"
        for account in ("available:%", "reserved:%")
    )
    charged = "NEW.account = 'revenue' AND t.kind IN ('part', 'void')"
    whose = (
        "CASE WHEN NEW.account LIKE 'available:%' THEN SUBSTR(NEW.account, 11)"
        " WHEN NEW.account LIKE 'reserved:%' THEN SUBSTR(NEW.account, 10) ELSE t.project_id END"
    )
    add = (
        "INSERT INTO balances (project_id, available_nanos, reserved_nanos, month, month_nanos)"  # noqa: S608  ours
        f" SELECT {whose}, {amounts}, {year} * 12 + {month} - 1,"
        f" CASE WHEN {charged} THEN NEW.amount_nanos ELSE 0 END"
        " FROM ledger_transactions t WHERE t.id = NEW.transaction_id"
        " ON CONFLICT (project_id) DO UPDATE SET"
        " available_nanos = balances.available_nanos + excluded.available_nanos,"
        " reserved_nanos = balances.reserved_nanos + excluded.reserved_nanos,"
        " month_nanos = CASE WHEN balances.month < excluded.month THEN excluded.month_nanos"
        " WHEN balances.month = excluded.month THEN balances.month_nanos + excluded.month_nanos"
        " ELSE balances.month_nanos END,"
        " month = CASE WHEN balances.month < excluded.month THEN excluded.month ELSE balances.month END"
    )
    if is_sqlite:
        op.execute(f"CREATE TRIGGER balances_by_entry AFTER INSERT ON ledger_entries BEGIN {add}; END")
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION add_entry_to_balance() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {add}; RETURN NULL; END $$"
    )
    op.execute(
        "CREATE TRIGGER balances_by_entry AFTER INSERT ON ledger_entries"
        " FOR EACH ROW EXECUTE FUNCTION add_entry_to_balance()"
    )


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
        f"INSERT INTO usage_hours ({columns}) SELECT {hour.format('')}, {', '.join(keys)},"  # noqa: S608  names of ours
        f" {', '.join(f'SUM({name})' for name in USAGE_SUMS)}"
        f" FROM usage GROUP BY {hour.format('')}, {', '.join(keys)}"
    )
    new = ", ".join(f"NEW.{name}" for name in (*keys, *USAGE_SUMS))
    add = (
        f"INSERT INTO usage_hours ({columns}) VALUES ({hour.format('NEW.')}, {new})"  # noqa: S608  names of ours
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
    op.drop_table("reconciliations")
    _drop_invoices()
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
    op.drop_column("units", "spent_nanos")
    op.drop_column("units", "granted_nanos")
    op.drop_column("windows", "high_nanos")
    for column in ("over_budget", "wanted_nanos", "has_budget", "max_cost_nanos"):
        op.drop_column("batches", column)
    op.drop_column("projects", "is_prepaid")
    op.drop_column("projects", "budget_nanos")
    op.execute(
        "DROP TRIGGER balances_by_entry" + ("" if op.get_bind().dialect.name == "sqlite" else " ON ledger_entries")
    )
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION add_entry_to_balance()")
    op.drop_table("balances")
    op.drop_index("ix_ledger_transactions_statement", "ledger_transactions")
    op.execute("DELETE FROM ledger_entries WHERE transaction_id IN"
               " (SELECT id FROM ledger_transactions WHERE batch_id IS NULL)")  # fmt: skip
    op.execute("DELETE FROM ledger_transactions WHERE batch_id IS NULL")
    with op.batch_alter_table("ledger_transactions") as table:
        table.drop_column("actor")
        table.drop_column("reason")
        table.alter_column("batch_id", existing_type=sa.String(64), nullable=False)


INVOICE_STATE = ("status", "status_ms", "status_reason")  # all that may change of an issued invoice


def _invoice_columns() -> list[sa.Column]:
    return [
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("series", sa.String(24), nullable=True),
        sa.Column("no", BIG, nullable=True),
        sa.Column("number", sa.String(40), nullable=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("status_ms", BIG, nullable=False),
        sa.Column("status_reason", sa.String(255), nullable=True),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("issued_ms", BIG, nullable=True),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("projects", JSON, nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("seller", JSON, nullable=False),
        sa.Column("buyer", JSON, nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("exponent", sa.Integer(), nullable=False),
        sa.Column("exchange_rate_nanos", BIG, nullable=False),
        sa.Column("tax_rate_ppm", sa.Integer(), nullable=False),
        sa.Column("tax_note", sa.String(255), nullable=False),
        *(
            sa.Column(name, BIG, nullable=False)
            for name in ("net_nanos", "tax_nanos", "rounding_nanos", "payable_nanos")
        ),
        *(sa.Column(name, sa.String(40), nullable=False) for name in ("net", "tax", "rounding")),
        sa.Column("payable_minor", BIG, nullable=False),
        sa.Column("corrects", sa.String(40), nullable=True),
        sa.Column("reason", sa.String(255), nullable=True),
        sa.Column("key", sa.String(160), nullable=True),
    ]


def _create_invoices() -> None:
    op.create_table(
        "billing_parties",
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("country", sa.String(2), nullable=False),
        sa.Column("tax_id", sa.String(64), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("tax_rate_ppm", sa.Integer(), nullable=True),
        sa.Column("is_reverse_charge", sa.Boolean(), nullable=False),
        sa.Column("bill_to", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("project_id", name=op.f("pk_billing_parties")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_billing_parties_project_id_projects")),
        sa.ForeignKeyConstraint(["bill_to"], ["projects.id"], name=op.f("fk_billing_parties_bill_to_projects")),
    )
    op.create_index(op.f("ix_billing_parties_bill_to"), "billing_parties", ["bill_to"])
    op.create_table(
        "invoice_series",
        sa.Column("series", sa.String(24), nullable=False),
        sa.Column("last", BIG, nullable=False),
        sa.PrimaryKeyConstraint("series", name=op.f("pk_invoice_series")),
    )
    op.create_table(
        "invoices",
        *_invoice_columns(),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_invoices_project_id_projects")),
        sa.UniqueConstraint("series", "no", name=op.f("uq_invoices_series_no")),
        sa.UniqueConstraint("number", name=op.f("uq_invoices_number")),
        sa.UniqueConstraint("key", name=op.f("uq_invoices_key")),
    )
    op.create_index("ix_invoices_project", "invoices", ["project_id", "month"])
    op.create_index(op.f("ix_invoices_corrects"), "invoices", ["corrects"])
    op.create_table(
        "invoice_lines",
        sa.Column("invoice_id", sa.String(64), nullable=False),
        sa.Column("no", sa.Integer(), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("tier", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(24), nullable=False),
        sa.Column("price_version", sa.Integer(), nullable=False),
        sa.Column("tokens", BIG, nullable=False),
        sa.Column("rate_nanos", BIG, nullable=True),
        sa.Column("amount_nanos", BIG, nullable=False),
        sa.Column("reverses", sa.String(40), nullable=True),
        sa.Column("batch_id", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("invoice_id", "no", name=op.f("pk_invoice_lines")),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_lines_invoice_id_invoices")),
    )
    op.create_table(
        "invoice_claims",
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("month", sa.String(7), nullable=False),
        sa.Column("invoice_id", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("project_id", "month", name=op.f("pk_invoice_claims")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_invoice_claims_project_id_projects")),
        sa.ForeignKeyConstraint(["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_claims_invoice_id_invoices")),
    )
    op.create_index(op.f("ix_invoice_claims_invoice_id"), "invoice_claims", ["invoice_id"])
    if op.get_bind().dialect.name == "sqlite":
        _freeze_invoices_sqlite()
    else:
        _freeze_invoices_postgresql()


def _freeze_invoices_sqlite() -> None:
    content = [column.name for column in _invoice_columns() if column.name not in INVOICE_STATE]
    changed = " OR ".join(f'NEW."{name}" IS NOT OLD."{name}"' for name in content)
    says = "SELECT RAISE(ABORT, 'an issued invoice never changes')"
    op.execute(
        "CREATE TRIGGER invoices_no_update BEFORE UPDATE ON invoices WHEN OLD.status <> 'draft' AND"
        f" (OLD.status IN ('paid', 'void') OR NEW.status = 'draft' OR {changed}) BEGIN {says}; END"
    )
    op.execute(
        f"CREATE TRIGGER invoices_no_delete BEFORE DELETE ON invoices WHEN OLD.status <> 'draft' BEGIN {says}; END"
    )
    for verb, row in (("INSERT", "NEW"), ("UPDATE", "OLD"), ("DELETE", "OLD")):
        op.execute(
            f"CREATE TRIGGER invoice_lines_no_{verb.lower()} BEFORE {verb} ON invoice_lines"  # noqa: S608
            f" WHEN (SELECT status FROM invoices WHERE id = {row}.invoice_id) <> 'draft' BEGIN {says}; END"
        )


def _freeze_invoices_postgresql() -> None:
    says = "RAISE EXCEPTION 'an issued invoice never changes' USING ERRCODE = 'restrict_violation';"
    state = ", ".join(f"'{name}'" for name in INVOICE_STATE)
    op.execute(
        "CREATE FUNCTION keep_invoice() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF TG_OP = 'TRUNCATE' THEN {says} END IF;"
        " IF OLD.status = 'draft' THEN RETURN COALESCE(NEW, OLD); END IF;"
        " IF TG_OP = 'DELETE' OR OLD.status IN ('paid', 'void') OR NEW.status = 'draft'"
        f" OR to_jsonb(NEW) - ARRAY[{state}] <> to_jsonb(OLD) - ARRAY[{state}] THEN {says} END IF;"
        " RETURN NEW; END $$"
    )
    op.execute(
        "CREATE FUNCTION keep_invoice_line() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"  # noqa: S608
        f" IF TG_OP = 'TRUNCATE' THEN {says} END IF;"
        " IF EXISTS (SELECT 1 FROM invoices WHERE status <> 'draft' AND"
        f" id = CASE WHEN TG_OP = 'INSERT' THEN NEW.invoice_id ELSE OLD.invoice_id END) THEN {says} END IF;"
        " RETURN COALESCE(NEW, OLD); END $$"
    )
    for table, function, verbs in (
        ("invoices", "keep_invoice", "UPDATE OR DELETE"),
        ("invoice_lines", "keep_invoice_line", "INSERT OR UPDATE OR DELETE"),
    ):
        op.execute(
            f"CREATE TRIGGER {table}_no_change BEFORE {verbs} ON {table} FOR EACH ROW EXECUTE FUNCTION {function}()"
        )
        op.execute(
            f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}"
            f" FOR EACH STATEMENT EXECUTE FUNCTION {function}()"
        )


def _drop_invoices() -> None:
    for table in ("invoice_claims", "invoice_lines", "invoices", "invoice_series", "billing_parties"):
        op.drop_table(table)
    if op.get_bind().dialect.name != "sqlite":
        op.execute("DROP FUNCTION keep_invoice()")
        op.execute("DROP FUNCTION keep_invoice_line()")
