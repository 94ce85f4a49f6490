"""A deployment in this process: API, planner and finalizer on real parts, and engine workers where tests want them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi.testclient import TestClient
from sqlalchemy import func, select

from batchsvc.app import create_app
from batchsvc.batches.tables import Batch
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction
from batchsvc.db.session import Database
from engine.fake import FakeEngine
from tests.batchsvc.batches.planned import URL
from tests.batchsvc.batches.quoting import Quoting
from tests.workers.conftest import World
from tests.workers.test_engine_run import Hints, completed, until
from workers.finalize import Finalizer
from workers.pump import EngineLike
from workers.step import EngineRun

Problem = tuple[int | None, str, str | None]


@dataclass(frozen=True)
class Ended:
    """A batch that has ended, as a client sees it: its object, and the lines of its files by their numbers."""

    batch: dict[str, Any]
    output: dict[int, dict[str, Any]]
    errors: dict[int, dict[str, Any]]

    @property
    def answers(self) -> dict[int, dict[str, Any]]:
        """The bodies of the answers."""
        return {number: row["response"]["body"] for number, row in self.output.items()}

    @property
    def texts(self) -> dict[str, str]:
        """The answers of chats by custom_id."""
        return {row["custom_id"]: _text(row) for row in self.output.values()}

    @property
    def refusals(self) -> dict[int, tuple[str, str | None]]:
        """Code and param of the lines that ran, or would have, and were rejected."""
        found = {}
        for number, row in self.errors.items():
            assert row["error"] is None and row["response"]["status_code"] == 400, row
            error = row["response"]["body"]["error"]
            found[number] = (error["code"], error["param"])
        return found

    @property
    def codes(self) -> dict[int, str]:
        """Codes of the lines that never ran."""
        assert all(row["response"] is None for row in self.errors.values())
        return {number: row["error"]["code"] for number, row in self.errors.items()}


class Service:
    """What a client does, and what the processes behind the API do for it."""

    def __init__(self, door: Quoting) -> None:
        self.door, self.planned, self.client = door, door.planned, door.client
        self.settings = door.planned.context.settings
        self.world = World(self.settings, self.planned.db, self.planned.store)

    def with_settings(self, **changes: Any) -> Service:
        """The same deployment whose API and planner have other settings."""
        planned = self.planned.with_settings(**changes)
        app = create_app(planned.context.settings, self.door.hints)
        client = TestClient(app, headers=self.client.headers, client=("127.0.0.1", 50_000))
        return Service(Quoting(planned, client, self.door.hints, self.door.key))

    @contextmanager
    def working(
        self, engine: EngineLike | None = None, name: str = "w", digest: str | None = None
    ) -> Iterator[Service]:
        """While an engine worker runs, of the usual model or that with this digest."""
        worker = EngineRun(
            self.settings,
            Database(self.settings.database_url),
            self.planned.store,
            Hints(),
            engine or FakeEngine(self.planned.text),
            digest=digest or self.planned.text.meta.digest,
            owner=f"host:1:{name}",
            on_failure=lambda: None,
        )
        worker.start()
        try:
            yield self
        finally:
            worker.signalled()
            worker.signalled()
            worker.drain()

    def upload(self, data: bytes, name: str = "in.jsonl") -> str:
        return self.door.upload(data, name)

    def create(self, data: bytes, **more: Any) -> str:
        """A batch of these bytes, not planned yet."""
        answer = self.client.post("/v1/batches", json=_call(self.upload(data)) | more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def start(self, data: bytes, **more: Any) -> str:
        """A batch of these bytes, planned."""
        batch_id = self.create(data, **more)
        self.planned.plan(batch_id)
        return batch_id

    def run(self, data: bytes, **more: Any) -> Ended:
        """A batch of these bytes, after its end."""
        return self.finish(self.start(data, **more))

    def finish(self, batch_id: str) -> Ended:
        """A batch that an engine worker runs to its end."""
        assert self.shown(batch_id)["status"] == "in_progress", self.shown(batch_id)
        until(completed(self.world, batch_id), "all lines")
        assert self.finalize(batch_id)
        return self.ended(batch_id)

    def finalize(self, batch_id: str) -> bool:
        return Finalizer(self.settings, self.planned.db, self.planned.store, "f").finalize(batch_id)

    def accepted(self, data: bytes, **more: Any) -> dict[str, Any]:
        """A batch of these bytes that could run, and doesn't."""
        batch_id = self.create(data, **more)
        assert self.client.post(f"/v1/batches/{batch_id}/pause").status_code == 200
        self.planned.plan(batch_id)
        batch = self.shown(batch_id)
        assert batch["status"] == "in_progress", batch
        assert self.client.post(f"/v1/batches/{batch_id}/cancel").status_code == 200
        return batch

    def refusal(self, data: bytes, **more: Any) -> list[Problem]:
        """Line, code and param of every problem of a batch that is refused whole, without a trace."""
        batch = self.shown(self.start(data, **more))
        assert batch["status"] == "failed", batch
        assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)
        problems = batch["errors"]["data"]
        assert batch["errors_total"] >= len(problems) > 0
        assert all(problem["message"] for problem in problems)
        return [(problem["line"], problem["code"], problem["param"]) for problem in problems]

    def shown(self, batch_id: str) -> dict[str, Any]:
        answer = self.client.get(f"/v1/batches/{batch_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def content(self, file_id: str | None) -> bytes:
        """The bytes of a result file; none, if there is no file."""
        if file_id is None:
            return b""
        answer = self.client.get(f"/v1/files/{file_id}/content")
        assert answer.status_code == 200, answer.text
        assert answer.content, "an empty file is never made"
        return answer.content

    def ended(self, batch_id: str) -> Ended:
        """What is left of an ended batch. Each line is there once, in input order, and the bill is their sum."""
        batch = self.shown(batch_id)
        assert batch["status"] in ("completed", "cancelled", "expired"), batch
        output, errors = (self._lines(batch[name]) for name in ("output_file_id", "error_file_id"))
        assert not output.keys() & errors.keys()
        assert batch["request_counts"] == {
            "total": len(output) + len(errors),
            "completed": len(output),
            "failed": len(errors),
        }
        assert all(row["error"] is None and row["response"]["status_code"] == 200 for row in output.values())
        bill = sum(row["response"]["body"]["usage"]["cost_nanos"] for row in output.values())
        assert batch["usage"]["cost_nanos"] == bill == self.revenue(batch_id)
        assert self.held(batch_id) == 0, "the reservation is released"
        return Ended(batch, output, errors)

    def revenue(self, batch_id: str) -> int:
        """What the ledger says that a batch was charged."""
        return self._posted(batch_id, LedgerEntry.account == "revenue")

    def held(self, batch_id: str) -> int:
        """What the ledger says that is reserved for a batch."""
        return self._posted(batch_id, LedgerEntry.account.startswith("reserved:"))

    def postings(self, batch_id: str) -> int:
        """How many transactions of the ledger a batch has."""
        with self.planned.db.reading() as session:
            counted = select(func.count(LedgerTransaction.id)).where(LedgerTransaction.batch_id == batch_id)
            return int(session.scalar(counted) or 0)

    def change(self, batch_id: str, **values: Any) -> None:
        """Shift times, as if a clock had gone on."""
        with self.planned.db.transaction() as session:
            row = session.get_one(Batch, batch_id)
            for name, value in values.items():
                setattr(row, name, value)

    def _lines(self, file_id: str | None) -> dict[int, dict[str, Any]]:
        data = self.content(file_id)
        rows = data.decode().splitlines()  # on more than line feeds, as clients do
        assert len(rows) == data.count(b"\n"), "no reader finds other lines"
        found = [json.loads(row, parse_constant=_refuse) for row in rows]
        numbers = [row["line"] for row in found]
        assert numbers == sorted(set(numbers)), "in input order, each once"
        return {row["line"]: row for row in found}

    def _posted(self, batch_id: str, which: Any) -> int:
        with self.planned.db.reading() as session:
            total = (
                select(func.coalesce(func.sum(LedgerEntry.amount_nanos), 0))
                .join(LedgerTransaction, LedgerEntry.transaction_id == LedgerTransaction.id)
                .where(LedgerTransaction.batch_id == batch_id, which)
            )
            return int(session.scalar(total) or 0)


def _call(file_id: str) -> dict[str, Any]:
    return {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"}


def _text(row: dict[str, Any]) -> str:
    return str(row["response"]["body"]["choices"][0]["message"]["content"])


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
