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
    _count_calls_by_group()
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
    _count_no_calls()
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


def _count_calls_by_group() -> None:
    """Let hours of usage without a batch, which nobody has yet, be one for each group. No row is read but those of
    hours; on PostgreSQL writers of usage wait for a moment, so that none is between the old key and the new trigger."""
    _hold_off_usage()
    with op.batch_alter_table("usage_hours") as hours:
        hours.add_column(sa.Column("call_group", sa.String(320), nullable=False, server_default=""))
        hours.drop_constraint("pk_usage_hours", type_="primary")
        hours.create_primary_key("pk_usage_hours", ["batch_id", "hour_ms", "model", "call_group"])
    _add_usage_to_hours(has_group=True)
    values = _hour_of("", has_group=True)  # calls from before a downgrade; served by ix_usage_batch_id
    sums = [f"SUM({name})" if name in SUMS else value for name, value in values.items()]
    grouped = [value for name, value in values.items() if name not in SUMS]
    op.execute(
        f"INSERT INTO usage_hours ({', '.join(values)}) SELECT {', '.join(sums)}"  # noqa: S608  names of ours
        f" FROM usage WHERE batch_id = '' GROUP BY {', '.join(grouped)}"
    )


def _count_no_calls() -> None:
    """The key before. It can't tell whose calls are in an hour, so their hours go; their usage stays."""
    _hold_off_usage()
    op.execute("DELETE FROM usage_hours WHERE batch_id = ''")
    with op.batch_alter_table("usage_hours") as hours:
        hours.drop_constraint("pk_usage_hours", type_="primary")
        hours.create_primary_key("pk_usage_hours", ["batch_id", "hour_ms", "model"])
        hours.drop_column("call_group")
    _add_usage_to_hours(has_group=False)


def _hold_off_usage() -> None:
    """Nobody writes usage until this transaction ends; on SQLite, which has one writer, its trigger has to go."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    op.execute("DROP TRIGGER usage_by_hour" if is_sqlite else "LOCK TABLE usage IN SHARE ROW EXCLUSIVE MODE")


def _hour_of(row: str, *, has_group: bool) -> dict[str, str]:
    """Columns of an hour, and what a row of usage gives each of them."""
    given = {"hour_ms": f"{row}created_ms / 3600000 * 3600000"} | {name: f"{row}{name}" for name in (*KEYS, *SUMS)}
    if has_group:
        group = " || '/' || ".join(f"{row}{name}" for name in GROUP)
        given["call_group"] = f"CASE WHEN {row}batch_id = '' THEN {group} ELSE '' END"
    return given


def _add_usage_to_hours(*, has_group: bool) -> None:
    """The trigger of revision 0009 anew, for another key."""
    values = _hour_of("NEW.", has_group=has_group)
    key = ("batch_id", "hour_ms", "model", *(["call_group"] if has_group else []))
    add = (
        f"INSERT INTO usage_hours ({', '.join(values)}) VALUES ({', '.join(values.values())})"  # noqa: S608  ours
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET "
        + ", ".join(f"{name} = usage_hours.{name} + excluded.{name}" for name in SUMS)
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"CREATE TRIGGER usage_by_hour AFTER INSERT ON usage BEGIN {add}; END")
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION add_usage_to_hour() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {add}; RETURN NULL; END $$"
    )
