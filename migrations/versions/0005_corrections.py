"""What corrections of money need: what refunds take back, what invoices have said, and rows that nothing replaces."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

APPEND_ONLY = {  # table -> its other unique columns, by which a repeated insert is nothing new
    "ledger_transactions": ("key",),
    "ledger_entries": (),
    "usage": (),
    "prices": ("version", "model", "tier", "kind"),
}
ISSUED = "an issued invoice never changes"
_CORRECTING = "kind IN ('refund', 'credit', 'credit_note')"


def upgrade() -> None:
    # a refund says in which month was used what it takes back: by that it finds its invoice
    op.add_column("ledger_transactions", sa.Column("corrects_month", sa.String(7), nullable=True))
    _note_months()
    op.create_index(
        "ix_ledger_transactions_corrections",
        "ledger_transactions",
        ["created_ms"],
        sqlite_where=sa.text(_CORRECTING),
        postgresql_where=sa.text(_CORRECTING),
    )
    # what a row of an invoice's CSV corrects, as it was known when the invoice was made
    op.create_table(
        "invoice_corrections",
        sa.Column("invoice_id", sa.String(64), nullable=False),
        sa.Column("key", sa.String(160), nullable=False),
        sa.Column("corrects", sa.String(40), nullable=False),
        sa.PrimaryKeyConstraint("invoice_id", "key", name=op.f("pk_invoice_corrections")),
        sa.ForeignKeyConstraint(
            ["invoice_id"], ["invoices.id"], name=op.f("fk_invoice_corrections_invoice_id_invoices")
        ),
    )
    # whether the money of a leased unit's lines is granted before they run
    op.add_column("units", sa.Column("is_metered", sa.Boolean(), nullable=False, server_default=sa.false()))
    if op.get_bind().dialect.name == "sqlite":
        _freeze_sqlite()
    else:
        _freeze_postgresql()


def _note_months() -> None:
    """Refunds of a batch that were made before: by the month in which it last used something."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    last = "(SELECT MAX(u.created_ms) FROM usage u WHERE u.batch_id = ledger_transactions.batch_id)"
    month = (
        f"strftime('%Y-%m', {last} / 1000, 'unixepoch')"
        if is_sqlite
        else f"to_char(to_timestamp({last} / 1000) AT TIME ZONE 'UTC', 'YYYY-MM')"
    )
    note = f"UPDATE ledger_transactions SET corrects_month = {month} WHERE kind = 'refund' AND batch_id IS NOT NULL"  # noqa: S608
    if not is_sqlite:
        op.execute("ALTER TABLE ledger_transactions DISABLE TRIGGER ledger_transactions_no_change")
        op.execute(note)
        op.execute("ALTER TABLE ledger_transactions ENABLE TRIGGER ledger_transactions_no_change")
        return
    op.execute("DROP TRIGGER ledger_transactions_no_update")
    op.execute(note)
    op.execute(
        "CREATE TRIGGER ledger_transactions_no_update BEFORE UPDATE ON ledger_transactions"
        " BEGIN SELECT RAISE(ABORT, 'ledger_transactions is append-only'); END"
    )


def _freeze_sqlite() -> None:
    """INSERT OR REPLACE deletes what is in its way, and no trigger of a delete is told unless a connection asks for it.

    So an insert in the way of a row is stopped before: by an id, it is refused; by what makes a posting, a usage row or
    a price known, it was done before and changes nothing, as ON CONFLICT DO NOTHING would have it.
    """
    for table, key in APPEND_ONLY.items():
        same_id = "part_id = NEW.part_id" if table == "usage" else "id = NEW.id"
        if key or table == "usage":
            same_key = " AND ".join(f'"{name}" = NEW."{name}"' for name in key) or same_id
            op.execute(
                f"CREATE TRIGGER {table}_once BEFORE INSERT ON {table}"  # noqa: S608
                f" WHEN EXISTS (SELECT 1 FROM {table} WHERE {same_key}) BEGIN SELECT RAISE(IGNORE); END"
            )
        if table != "usage":
            op.execute(
                f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table}"  # noqa: S608
                f" WHEN EXISTS (SELECT 1 FROM {table} WHERE {same_id}) BEGIN"
                f" SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
    same = 'id = NEW.id OR number = NEW.number OR "key" = NEW."key" OR (series = NEW.series AND no = NEW.no)'
    says = f"SELECT RAISE(ABORT, '{ISSUED}')"
    op.execute(
        "CREATE TRIGGER invoices_no_replace BEFORE INSERT ON invoices"  # noqa: S608
        f" WHEN EXISTS (SELECT 1 FROM invoices WHERE status <> 'draft' AND ({same})) BEGIN {says}; END"
    )
    op.execute(
        "CREATE TRIGGER invoices_no_overwrite BEFORE UPDATE ON invoices WHEN EXISTS"  # noqa: S608
        f" (SELECT 1 FROM invoices WHERE status <> 'draft' AND id <> OLD.id AND ({same})) BEGIN {says}; END"
    )
    op.execute("DROP TRIGGER invoice_lines_no_update")
    for table in ("invoice_lines", "invoice_corrections"):
        verbs = {"UPDATE": "OLD.invoice_id, NEW.invoice_id"}
        if table == "invoice_corrections":
            verbs |= {"INSERT": "NEW.invoice_id", "DELETE": "OLD.invoice_id"}
        for verb, ids in verbs.items():
            op.execute(
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} WHEN EXISTS"  # noqa: S608
                f" (SELECT 1 FROM invoices WHERE status <> 'draft' AND id IN ({ids})) BEGIN {says}; END"
            )


def _freeze_postgresql() -> None:
    says = f"RAISE EXCEPTION '{ISSUED}' USING ERRCODE = 'restrict_violation';"
    ask = "EXISTS (SELECT 1 FROM invoices WHERE status <> 'draft' AND id = {})"
    op.execute(
        "CREATE OR REPLACE FUNCTION keep_invoice_line() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF TG_OP = 'TRUNCATE' THEN {says} END IF;"
        f" IF TG_OP <> 'INSERT' THEN IF {ask.format('OLD.invoice_id')} THEN {says} END IF; END IF;"
        f" IF TG_OP <> 'DELETE' THEN IF {ask.format('NEW.invoice_id')} THEN {says} END IF; END IF;"
        " RETURN COALESCE(NEW, OLD); END $$"
    )
    for name, verbs, each in (("change", "INSERT OR UPDATE OR DELETE", "ROW"), ("truncate", "TRUNCATE", "STATEMENT")):
        op.execute(
            f"CREATE TRIGGER invoice_corrections_no_{name} BEFORE {verbs} ON invoice_corrections"
            f" FOR EACH {each} EXECUTE FUNCTION keep_invoice_line()"
        )


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        for table, key in APPEND_ONLY.items():
            if key or table == "usage":
                op.execute(f"DROP TRIGGER {table}_once")
            if table != "usage":
                op.execute(f"DROP TRIGGER {table}_no_replace")
        op.execute("DROP TRIGGER invoices_no_replace")
        op.execute("DROP TRIGGER invoices_no_overwrite")
    op.drop_column("units", "is_metered")
    op.drop_table("invoice_corrections")
    op.drop_index("ix_ledger_transactions_corrections", "ledger_transactions")
    op.drop_column("ledger_transactions", "corrects_month")
