"""The alembic environment: migrates the connection it is given, else the database of DATABASE_URL."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.tables import metadata


def migrate(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        render_as_batch=connection.dialect.name == "sqlite",  # SQLite alters a table by copying it
        transaction_per_migration=True,
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    database = Database(Settings.from_env().database_url)
    with database.engine.connect() as opened:
        migrate(opened)
    database.dispose()
