"""The API in this process before a planner on real parts: files are uploaded, quoted, and made batches of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from batchsvc.accounts import service as accounts
from batchsvc.app import create_app
from batchsvc.batches import quote_planning
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.tables import Model, Quote
from batchsvc.settings import Settings
from engine.text import load_text
from tests.batchsvc.batches.planned import PROJECT, URL, Planned, make_planned
from tests.dispatchers import NullDispatcher


class Hints(NullDispatcher):
    """Remembers which quotes a control worker was asked to plan."""

    def __init__(self) -> None:
        self.quotes: list[str] = []

    def quote(self, quote_id: str) -> None:
        self.quotes.append(quote_id)


class Quoting:
    """One project with a key, and what a client does with it."""

    def __init__(self, planned: Planned, client: TestClient, hints: Hints, key: str) -> None:
        self.planned, self.client, self.hints, self.key = planned, client, hints, key

    def upload(self, data: bytes, name: str = "in.jsonl") -> str:
        answer = self.client.post("/v1/files", data={"purpose": "batch"}, files={"file": (name, data)})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def ask(self, data: bytes, **more: Any) -> Any:
        """The answer to a call for a quote of these bytes."""
        return self.client.post("/v1/batches/quote", json={"input_file_id": self.upload(data)} | more)

    def quote(self, data: bytes, **more: Any) -> dict[str, Any]:
        """A quote of these bytes, planned."""
        answer = self.ask(data, **more)
        assert answer.status_code == 200, answer.text
        quote = answer.json()
        if quote["status"] == "queued":
            assert self.hints.quotes[-1] == quote["id"], "a control worker was asked"
            assert self.plan(quote["id"]) == PlanProgress.DONE
        return self.shown(quote["id"])

    def plan(self, quote_id: str, planned: Planned | None = None) -> PlanProgress:
        """As a control worker does."""
        context = (planned or self.planned).context
        for _ in range(1000):
            progress = quote_planning.plan_next_window(context, quote_id, "w1")
            if progress != PlanProgress.AGAIN:
                return progress
        raise AssertionError("planning doesn't end")

    def shown(self, quote_id: str) -> dict[str, Any]:
        answer = self.client.get(f"/v1/batches/quote/{quote_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def create(self, file_id: str, **more: Any) -> Any:
        body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}
        return self.client.post("/v1/batches", json=body | more)

    def row(self, quote_id: str) -> Quote:
        with self.planned.db.reading() as session:
            return session.get_one(Quote, quote_id)

    def change(self, table: type[Quote] | type[Model], key: str, **values: Any) -> None:
        with self.planned.db.transaction() as session:
            row = session.get_one(table, key)
            for name, value in values.items():
                setattr(row, name, value)


@contextmanager
def quoting(settings: Settings, model: Path, load: Callable[[str], Any] = load_text) -> Iterator[Quoting]:
    planned = make_planned(settings, model, load)
    with planned.db.transaction() as session:
        key = accounts.create_key(session, PROJECT, "k", is_admin=True)[1]
    hints = Hints()
    app = create_app(settings, hints)
    client = TestClient(app, headers={"Authorization": f"Bearer {key}"}, client=("127.0.0.1", 50_000))
    yield Quoting(planned, client, hints, key)
    app.state.context.db.dispose()
    planned.db.dispose()


def with_settings(made: Quoting, **changes: Any) -> Quoting:
    """The same deployment whose API and planners have other settings from now on."""
    planned = made.planned.with_settings(**changes)
    app = create_app(planned.context.settings, made.hints)
    headers = {"Authorization": f"Bearer {made.key}"}
    return Quoting(
        replace(planned, context=planned.context),
        TestClient(app, headers=headers, client=("127.0.0.1", 50_000)),
        made.hints,
        made.key,
    )
