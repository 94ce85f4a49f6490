"""The API in this process on a fresh database, with one project and one file, for tests of what its objects say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi.testclient import TestClient
from sqlalchemy import insert

from batchsvc import ids
from batchsvc.accounts import service as accounts
from batchsvc.app import create_app
from batchsvc.batches import models
from batchsvc.batches.tables import Batch, Unit
from batchsvc.billing import service as billing
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.files.tables import File
from batchsvc.settings import Settings
from batchsvc.tables import metadata
from tests.dispatchers import NullDispatcher

MODEL, DIGEST = "tiny", "ab" * 32
HOUR_MS = 3_600_000


def hours(begin_in_h: int, end_in_h: int) -> str:
    """Off-peak hours, in UTC, that begin and end so many hours from now."""
    now = datetime.now(UTC)
    begin, end = (now + timedelta(hours=distance) for distance in (begin_in_h, end_in_h))
    return f"{begin:%H:%M}-{end:%H:%M}"


class Door:
    """What is behind the API, and clients of it under other settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.db = settings, Database(settings.database_url)
        metadata.create_all(self.db.engine)
        self.file_id = ids.file_id()
        with self.db.transaction() as session:
            billing.seed_prices(session)
            models.register(session, MODEL, "/models/tiny", digest=DIGEST, context_tokens=2048)
            self.project_id = accounts.create_project(session, "p").id
            self.key = accounts.create_key(session, self.project_id, "k", is_admin=True)[1]
            session.add(
                File(
                    id=self.file_id,
                    project_id=self.project_id,
                    purpose="batch",
                    filename="in.jsonl",
                    s3_key="in",
                    sha256="x",
                    created_ms=now_ms(),
                )
            )
        self._apps: list[Any] = []

    def client(self, **changes: Any) -> TestClient:
        """A client of an API with these settings changed."""
        app = create_app(self.settings.model_copy(update=changes), NullDispatcher())
        self._apps.append(app)
        return TestClient(app, headers={"Authorization": f"Bearer {self.key}"}, client=("127.0.0.1", 50_000))

    def create(self, client: TestClient, **more: Any) -> Any:
        body = {"input_file_id": self.file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return client.post("/v1/batches", json=body | more)

    def set(self, batch_id: str, **values: Any) -> None:
        with self.db.transaction() as session:
            batch = session.get_one(Batch, batch_id)
            for name, value in values.items():
                setattr(batch, name, value)

    def row(self, batch_id: str) -> Batch:
        with self.db.reading() as session:
            return session.get_one(Batch, batch_id)

    def start(self, batch_id: str, num_units: int, est_tokens: int = 100, state: str = "ready") -> None:
        """As if it had been planned into so many units."""
        units = [
            {
                "id": ids.unit_id(),
                "batch_id": batch_id,
                "project_id": self.project_id,
                "model_digest": DIGEST,
                "window_no": 0,
                "no": no,
                "s3_key": "unit",
                "sha256": "x",
                "num_lines": 1,
                "est_tokens": est_tokens,
                "state": state,
                "lease_ms": now_ms() + HOUR_MS,
                "done_bitmap": b"\0",
            }
            for no in range(num_units)
        ]
        self.set(batch_id, status="in_progress", in_progress_ms=now_ms(), model_id=MODEL, model_digest=DIGEST)
        with self.db.transaction() as session:
            session.execute(insert(Unit), units)

    def close(self) -> None:
        for app in self._apps:
            app.state.context.db.dispose()
            app.state.context.dispatcher.close()
        self.db.dispose()
