"""Who did what (append-only), what a key may do and until when, service accounts, and limits of keys and projects."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB, "postgresql")
LIMITS = ("requests_per_minute", "max_open_batches", "max_stored_bytes")


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("actor_kind", sa.String(16), nullable=False),
        sa.Column("actor_id", sa.String(128), nullable=False),
        sa.Column("actor_project_id", sa.String(64), nullable=True),
        sa.Column("address", sa.String(64), nullable=True),
        sa.Column("project_id", sa.String(64), nullable=True),
        sa.Column("target_id", sa.String(255), nullable=False),
        sa.Column("details", JSON, nullable=False),
        sa.Column("effective_ms", BIG, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_effective_ms_id"), "audit_log", ["effective_ms", "id"])
    op.create_index(op.f("ix_audit_log_target_id"), "audit_log", ["target_id"])
    op.create_index(op.f("ix_audit_log_project_id"), "audit_log", ["project_id"])
    op.create_table(
        "service_accounts",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("deleted_ms", BIG, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_service_accounts")),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_service_accounts_project_id_projects")),
    )
    op.create_index(op.f("ix_service_accounts_project_id"), "service_accounts", ["project_id"])
    # keys: null scopes are all of them, null expiry is never
    op.add_column("api_keys", sa.Column("scopes", JSON, nullable=True))
    op.add_column("api_keys", sa.Column("expires_ms", BIG, nullable=True))
    op.add_column("api_keys", sa.Column("last_used_ms", BIG, nullable=True))
    op.add_column("api_keys", sa.Column("service_account_id", sa.String(64), nullable=True))
    op.add_column("api_keys", sa.Column("replaced_by_id", sa.String(64), nullable=True))
    op.add_column("projects", sa.Column("archived_ms", BIG, nullable=True))
    for table in ("api_keys", "projects"):
        for name in LIMITS:
            op.add_column(table, sa.Column(name, BIG, nullable=True))
    op.add_column("files", sa.Column("api_key_id", sa.String(64), nullable=True))
    _append_only("audit_log")


def _append_only(table: str) -> None:
    """Rows that nothing changes, deletes or replaces; PostgreSQL has its function since revision 0003."""
    if op.get_bind().dialect.name == "sqlite":
        says = f"SELECT RAISE(ABORT, '{table} is append-only')"
        for verb in ("UPDATE", "DELETE"):
            op.execute(f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} BEGIN {says}; END")
        op.execute(
            f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table}"  # noqa: S608  names of ours
            f" WHEN EXISTS (SELECT 1 FROM {table} WHERE id = NEW.id) BEGIN {says}; END"
        )
        return
    for name, verbs, each in (("change", "UPDATE OR DELETE", "ROW"), ("truncate", "TRUNCATE", "STATEMENT")):
        op.execute(
            f"CREATE TRIGGER {table}_no_{name} BEFORE {verbs} ON {table}"
            f" FOR EACH {each} EXECUTE FUNCTION refuse_change()"
        )


def downgrade() -> None:
    op.drop_column("files", "api_key_id")
    for table in ("projects", "api_keys"):
        for name in LIMITS:
            op.drop_column(table, name)
    op.drop_column("projects", "archived_ms")
    for name in ("replaced_by_id", "service_account_id", "last_used_ms", "expires_ms", "scopes"):
        op.drop_column("api_keys", name)
    op.drop_table("service_accounts")
    op.drop_table("audit_log")
