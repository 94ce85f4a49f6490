"""What webhooks need: receivers, an outbox that a trigger fills when a batch ends, deliveries.

The trigger stands on the table `batches`: a later revision that has SQLite copy that table makes the trigger again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# written out, not imported: a migration must not change when the code does
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON().with_variant(JSONB(), "postgresql")
ENDS = "('completed', 'failed', 'expired', 'cancelled')"


def upgrade() -> None:
    op.add_column("projects", sa.Column("alert_percents", JSON, nullable=True))
    op.create_table(
        "webhook_endpoints",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("url", sa.String(2048), nullable=False),
        sa.Column("event_types", JSON, nullable=False),
        sa.Column("secret", sa.String(128), nullable=False),
        sa.Column("old_secrets", JSON, nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("updated_ms", BIG, nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("open_until_ms", BIG, nullable=False),
        sa.Column("epoch", BIG, nullable=False),
        sa.Column("owner", sa.String(128), nullable=True),
        sa.Column("lease_ms", BIG, nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_webhook_endpoints_project_id_projects")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_endpoints")),
    )
    op.create_index("ix_webhook_endpoints_listing", "webhook_endpoints", ["project_id", "created_ms", "id"])
    op.create_table(
        "webhook_events",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("data", JSON, nullable=False),
        sa.Column("key", sa.String(200), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("is_spread", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_events")),
        sa.UniqueConstraint("key", name=op.f("uq_webhook_events_key")),
    )
    op.create_index(
        "ix_webhook_events_new",
        "webhook_events",
        ["created_ms"],
        sqlite_where=sa.text("is_spread = 0"),
        postgresql_where=sa.text("NOT is_spread"),
    )
    op.create_index("ix_webhook_events_created", "webhook_events", ["created_ms"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("endpoint_id", sa.String(64), nullable=False),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_ms", BIG, nullable=False),
        sa.Column("due_ms", BIG, nullable=False),
        sa.Column("ended_ms", BIG, nullable=True),
        sa.Column("attempts", JSON, nullable=False),
        sa.ForeignKeyConstraint(
            ["endpoint_id"],
            ["webhook_endpoints.id"],
            name=op.f("fk_webhook_deliveries_endpoint_id_webhook_endpoints"),
        ),
        sa.ForeignKeyConstraint(
            ["event_id"], ["webhook_events.id"], name=op.f("fk_webhook_deliveries_event_id_webhook_events")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_webhook_deliveries")),
        sa.UniqueConstraint("endpoint_id", "event_id", name=op.f("uq_webhook_deliveries_endpoint_id_event_id")),
    )
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["endpoint_id", "due_ms"],
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index("ix_webhook_deliveries_listing", "webhook_deliveries", ["endpoint_id", "created_ms", "id"])
    op.create_index("ix_webhook_deliveries_event", "webhook_deliveries", ["event_id"])
    _note_ends()


def _note_ends() -> None:
    """A batch ends once, so its id, as an event's, names the event; repeating the statement adds nothing."""
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    data, untrue = ("json_object('id', NEW.id)", "0") if is_sqlite else ("jsonb_build_object('id', NEW.id)", "false")
    add = (
        "INSERT INTO webhook_events (id, project_id, type, data, key, created_ms, is_spread)"  # noqa: S608  names of ours
        f" VALUES (replace(NEW.id, 'batch_', 'evt_'), NEW.project_id, 'batch.' || NEW.status, {data},"
        f" 'ended:' || NEW.id, NEW.ended_ms, {untrue}) ON CONFLICT DO NOTHING"
    )
    has_ended = f"NEW.status IN {ENDS} AND OLD.status <> NEW.status AND NEW.ended_ms IS NOT NULL"
    is_heard = "EXISTS (SELECT 1 FROM webhook_endpoints e WHERE e.project_id = NEW.project_id)"
    if is_sqlite:
        op.execute(
            "CREATE TRIGGER webhook_event_by_batch AFTER UPDATE OF status ON batches"
            f" WHEN {has_ended} AND {is_heard} BEGIN {add}; END"
        )
        return
    op.execute(
        "CREATE FUNCTION add_webhook_event() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN IF {is_heard} THEN {add}; END IF; RETURN NULL; END $$"
    )
    op.execute(
        "CREATE TRIGGER webhook_event_by_batch AFTER UPDATE OF status ON batches FOR EACH ROW"
        f" WHEN ({has_ended}) EXECUTE FUNCTION add_webhook_event()"
    )


def downgrade() -> None:
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    op.execute("DROP TRIGGER webhook_event_by_batch" + ("" if is_sqlite else " ON batches"))
    if not is_sqlite:
        op.execute("DROP FUNCTION add_webhook_event()")
    for table in ("webhook_deliveries", "webhook_events", "webhook_endpoints"):
        op.drop_table(table)
    op.drop_column("projects", "alert_percents")
