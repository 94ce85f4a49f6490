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
_VOID = "void:"  # before the id of the part that a usage row takes back
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
    _note_corrections()
    # whether the money of a leased unit's lines is granted before they run
    op.add_column("units", sa.Column("is_metered", sa.Boolean(), nullable=False, server_default=sa.false()))
    if op.get_bind().dialect.name == "sqlite":
        _freeze_sqlite()
    else:
        _freeze_postgresql()


def _month_of(moment_ms: str) -> str:
    """The month of a moment in SQL, as `2024-01`."""
    if op.get_bind().dialect.name == "sqlite":
        return f"strftime('%Y-%m', {moment_ms} / 1000, 'unixepoch')"
    return f"to_char(to_timestamp({moment_ms} / 1000) AT TIME ZONE 'UTC', 'YYYY-MM')"


def _note_months() -> None:
    """Refunds of a batch that were made before: by the month in which it had last used something by then."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    last = (
        "(SELECT MAX(u.created_ms) FROM usage u WHERE u.batch_id = ledger_transactions.batch_id"  # noqa: S608
        f" AND substr(u.part_id, 1, 5) <> '{_VOID}' AND u.created_ms <= ledger_transactions.created_ms)"
    )
    note = (
        f"UPDATE ledger_transactions SET corrects_month = {_month_of(last)}"  # noqa: S608
        " WHERE kind = 'refund' AND batch_id IS NOT NULL"
    )
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


def _note_corrections() -> None:
    """What issued invoices say that their postings correct, from their rows: of refunds, and of reversals by month."""
    into = "INSERT INTO invoice_corrections (invoice_id, key, corrects)"
    rows = (
        "FROM invoices i JOIN invoice_lines l ON l.invoice_id = i.id AND l.reverses IS NOT NULL"
        " AND i.status <> 'draft' AND i.corrects IS NULL"
    )
    op.execute(
        f"{into} SELECT i.id, t.key, MIN(l.reverses) {rows} AND l.kind = 'refund'"
        " JOIN ledger_transactions t ON t.kind = 'refund' AND t.project_id = l.project_id AND t.batch_id = l.batch_id"
        f" AND {_month_of('t.created_ms')} = i.month"
        " JOIN ledger_entries e ON e.transaction_id = t.id AND e.account = 'revenue'"
        " AND e.amount_nanos = l.amount_nanos GROUP BY i.id, t.key"
    )
    used = _month_of("u.created_ms")
    op.execute(
        f"{into} SELECT i.id, v.part_id, MIN(l.reverses) {rows}"  # noqa: S608
        " JOIN usage v ON v.project_id = l.project_id AND v.model = l.model AND v.tier = l.tier"
        f" AND v.price_version = l.price_version AND {_month_of('v.created_ms')} = i.month"
        f" AND substr(v.part_id, 1, 5) = '{_VOID}' JOIN usage u ON u.part_id = substr(v.part_id, 6)"
        f" WHERE l.reverses = {used} OR EXISTS"
        f" (SELECT 1 FROM invoices o WHERE o.number = l.reverses AND o.month = {used}) GROUP BY i.id, v.part_id"
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
