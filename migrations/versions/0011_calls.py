"""Interactive calls in the books: a kind of posting, money held while they run, and hours of usage without a batch.

And models of a project: students that learned from its lines; and where prefill workers are found.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
SUMS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "cost_nanos")
KEYS = ("batch_id", "model", "project_id", "api_key_id", "tier", "endpoint", "price_version")
GROUP = KEYS[2:]  # whose usage without a batch it is


def upgrade() -> None:
    op.create_table(
        "call_holds",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("amount_nanos", BIG, nullable=False),
        sa.Column("expires_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_call_holds")),
    )
    op.create_index("ix_call_holds_project", "call_holds", ["project_id", "expires_ms"])
    _add_entries_to_balances("part", "void", "call")
    _rebuild_hours("batch_id", "hour_ms", "model", "call_group")
    op.add_column("models", sa.Column("project_id", sa.String(64), nullable=True))
    op.create_table(
        "prefill_engines",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("model_digest", sa.String(64), nullable=False),
        sa.Column("address", sa.String(255), nullable=False),
        sa.Column("beat_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prefill_engines")),
    )
    op.create_index(op.f("ix_prefill_engines_model_digest"), "prefill_engines", ["model_digest"])


def downgrade() -> None:
    op.drop_table("prefill_engines")
    op.drop_column("models", "project_id")
    _rebuild_hours("batch_id", "hour_ms", "model")
    _add_entries_to_balances("part", "void")
    op.drop_table("call_holds")


def _add_entries_to_balances(*charges: str) -> None:
    """The trigger of revision 0003 anew: postings of these kinds count as charged in their month."""
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
    kinds = ", ".join(f"'{kind}'" for kind in charges)
    charged = f"NEW.account = 'revenue' AND t.kind IN ({kinds})"
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
        op.execute("DROP TRIGGER balances_by_entry")
        op.execute(f"CREATE TRIGGER balances_by_entry AFTER INSERT ON ledger_entries BEGIN {add}; END")
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION add_entry_to_balance() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {add}; RETURN NULL; END $$"
    )


def _rebuild_hours(*key: str) -> None:
    """Make the hours of usage again, with this key: they are sums of rows that nobody changes. Of what is no key an
    hour has one row's value, as where the trigger adds to it. Usage without a batch has an hour for each group."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    has_group = "call_group" in key
    op.execute("DROP TRIGGER usage_by_hour" + ("" if is_sqlite else " ON usage"))
    op.drop_index("ix_usage_hours_time", "usage_hours")
    op.drop_table("usage_hours")
    op.create_table(
        "usage_hours",
        sa.Column("batch_id", sa.String(64), nullable=False),
        sa.Column("hour_ms", BIG, nullable=False),
        sa.Column("model", sa.String(255), nullable=False),
        *([sa.Column("call_group", sa.String(320), nullable=False)] if has_group else []),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("api_key_id", sa.String(64), nullable=False),
        sa.Column("tier", sa.String(32), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("price_version", sa.Integer(), nullable=False),
        *(sa.Column(name, BIG, nullable=False) for name in SUMS),
        sa.PrimaryKeyConstraint(*key, name=op.f("pk_usage_hours")),
    )
    op.create_index("ix_usage_hours_time", "usage_hours", ["hour_ms"])
    given = {"hour_ms": "{0}created_ms / 3600000 * 3600000"} | {name: f"{{0}}{name}" for name in KEYS}
    if has_group:
        group = " || '/' || ".join(f"{{0}}{name}" for name in GROUP)
        given["call_group"] = f"CASE WHEN {{0}}batch_id = '' THEN {group} ELSE '' END"
    columns = f"{', '.join(given)}, {', '.join(SUMS)}"
    old = {name: how.format("") for name, how in given.items()}
    kept = [how if name in key else f"MIN({how})" for name, how in old.items()]
    op.execute(
        f"INSERT INTO usage_hours ({columns}) SELECT {', '.join(kept)},"  # noqa: S608  names of ours
        f" {', '.join(f'SUM({name})' for name in SUMS)} FROM usage GROUP BY {', '.join(old[name] for name in key)}"
    )
    new = ", ".join([*(how.format("NEW.") for how in given.values()), *(f"NEW.{name}" for name in SUMS)])
    add = (
        f"INSERT INTO usage_hours ({columns}) VALUES ({new})"  # noqa: S608  names of ours
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
