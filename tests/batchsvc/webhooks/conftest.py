"""Fixtures of webhooks: a migrated database with a project, its receivers and batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import select, text

from batchsvc import ids
from batchsvc.accounts import service as accounts
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch
from batchsvc.billing import service as billing
from batchsvc.db.session import Database, database_now_ms
from batchsvc.webhooks import service
from batchsvc.webhooks.events import EventType
from batchsvc.webhooks.schemas import CreateEndpoint
from batchsvc.webhooks.tables import WebhookDelivery, WebhookEndpoint, WebhookEvent

RATES = {"input": 10_000_000, "cached_input": 2_500_000, "output": 40_000_000}


@dataclass
class Hooks:
    """A database with what tests of webhooks do to it."""

    db: Database
    project_id: str

    def add_endpoint(
        self, url: str = "https://x.example/", types: list[str] | None = None, project_id: str | None = None
    ) -> WebhookEndpoint:
        wanted = [str(kind) for kind in EventType] if types is None else types
        body = CreateEndpoint(name="n", url=url, event_types=wanted)
        return self.db.run(lambda session: service.create(session, project_id or self.project_id, body))

    def add_batch(self, status: Status = Status.IN_PROGRESS, **values: Any) -> str:
        batch_id = ids.batch_id()
        with self.db.transaction() as session:
            now = database_now_ms(session)
            row: dict[str, Any] = {
                "id": batch_id,
                "project_id": self.project_id,
                "api_key_id": "key",
                "endpoint": "/v1/chat/completions",
                "input_file_id": "file-x",
                "completion_window": "24h",
                "tier": "batch_24h",
                "status": status,
                "created_ms": now,
                "in_progress_ms": now,
                "expires_ms": now + 3_600_000,
                "model_id": "tiny",
                "model_digest": "d" * 64,
                "price_version": 1,
                "rates": {"tier": RATES, "standard": RATES},
                "total": 1,
            }
            session.add(Batch(**row | values))
        return batch_id

    def rows(self, table: type[Any]) -> list[Any]:
        with self.db.reading() as session:
            return list(session.scalars(select(table).order_by(table.created_ms, table.id)))

    def events(self) -> list[WebhookEvent]:
        return self.rows(WebhookEvent)

    def deliveries(self) -> list[WebhookDelivery]:
        return self.rows(WebhookDelivery)

    def set(self, table: str, **values: Any) -> None:
        """Change columns of all rows, such as times that a test doesn't wait for."""
        changes = ", ".join(f"{name} = :{name}" for name in values)
        with self.db.transaction() as session:
            session.execute(text(f"UPDATE {table} SET {changes}"), values)


@pytest.fixture
def hooks(migrated_url: str) -> Iterator[Hooks]:
    db = Database(migrated_url)
    with db.transaction() as session:
        billing.seed_prices(session)
        project_id = accounts.create_project(session, "tests").id
    yield Hooks(db, project_id)
    db.dispose()
