"""A planner on real parts for tests: database, bucket, a tiny model with its tokenizer; and what planning left."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from batchsvc import ids, tables
from batchsvc.accounts.tables import Project
from batchsvc.batches import models, part_file, planning, unit_file, window_file
from batchsvc.batches.part_file import PartLine
from batchsvc.batches.planning import PlanProgress
from batchsvc.batches.reading import PlanContext
from batchsvc.batches.tables import Batch, Garbage, Part, Unit, Window
from batchsvc.batches.unit_file import UnitFile
from batchsvc.batches.window_file import WindowLines
from batchsvc.billing import service as billing
from batchsvc.billing.tables import LedgerEntry
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.files.tables import File
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from engine.text import TextModel, load_text

URL = "/v1/chat/completions"
CONTEXT_TOKENS = 256
PROJECT = "proj_1"


def line(custom_id: Any, text: str = "Where is my parcel?", **body: Any) -> dict[str, Any]:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": fields | body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n" for item in lines)


@dataclass
class Planned:
    """A deployment with one model and the text side of it."""

    context: PlanContext
    text: TextModel

    @property
    def db(self) -> Database:
        return self.context.db

    @property
    def store(self) -> ObjectStore:
        return self.context.store

    def with_settings(self, **changes: Any) -> Planned:
        changed = self.context.settings.model_copy(update=changes)
        return Planned(PlanContext(self.db, self.store, changed, self.context.text_loader), self.text)

    def add_file(self, data: bytes) -> str:
        file_id = ids.file_id()
        key = keys.input_file(PROJECT, file_id)
        etag = self.store.put(key, data)
        with self.db.transaction() as session:
            session.add(
                File(
                    id=file_id,
                    project_id=PROJECT,
                    purpose="batch",
                    filename="in.jsonl",
                    s3_key=key,
                    etag=etag,
                    sha256="",
                    size_bytes=len(data),
                    created_ms=now_ms(),
                )
            )
        return file_id

    def add_batch(self, data: bytes, **changes: Any) -> str:
        now = now_ms()
        values = {
            "id": ids.batch_id(),
            "project_id": PROJECT,
            "api_key_id": "key",
            "endpoint": URL,
            "input_file_id": self.add_file(data),
            "completion_window": "24h",
            "tier": "batch_24h",
            "on_invalid": "fail",
            "status": "validating",
            "created_ms": now,
            "expires_ms": now + 86_400_000,
            "price_version": 1,
            "aliases": {"other-name": "tiny"},
        }
        with self.db.transaction() as session:
            session.add(Batch(**(values | changes)))
        return str((values | changes)["id"])

    def plan(self, batch_id: str, owner: str = "w1") -> PlanProgress:
        """Plans until there is no more to plan."""
        for _ in range(1000):
            progress = planning.plan_next_window(self.context, batch_id, owner)
            if progress != PlanProgress.AGAIN:
                return progress
        raise AssertionError("planning doesn't end")

    def run(self, data: bytes, **changes: Any) -> Batch:
        """A new batch, planned."""
        batch_id = self.add_batch(data, **changes)
        assert self.plan(batch_id) == PlanProgress.DONE
        return self.batch(batch_id)

    def batch(self, batch_id: str) -> Batch:
        with self.db.reading() as session:
            return session.get_one(Batch, batch_id)

    def rows(self, table: Any, batch_id: str) -> list[Any]:
        with self.db.reading() as session:
            order = table.created_ms if table is Part else table.no
            return list(session.scalars(select(table).where(table.batch_id == batch_id).order_by(order)))

    def units(self, batch_id: str) -> list[UnitFile]:
        return [unit_file.read(self.store.get(unit.s3_key)) for unit in self.rows(Unit, batch_id)]

    def lines(self, batch_id: str) -> dict[int, tuple[str, int, int, int]]:
        """By line number what will run: custom_id, prompt tokens, planned cached tokens, max_tokens."""
        found: dict[int, tuple[str, int, int, int]] = {}
        for unit in self.units(batch_id):
            for _, index, member in unit.lines():
                row = unit.rows[index]
                assert row.line_nos[member] not in found
                what = (row.custom_ids[member], len(row.prompt_ids), row.cached_tokens(member), row.max_tokens)
                found[row.line_nos[member]] = what
        return found

    def rejected(self, batch_id: str) -> dict[int, dict[str, Any]]:
        """By line number the rows of the error parts."""
        lines: list[PartLine] = []
        for part in self.rows(Part, batch_id):
            assert part.unit_id is None
            lines += part_file.decode(self.store.get(part.s3_key))
        assert len({item.line_no for item in lines}) == len(lines)
        return {item.line_no: json.loads(item.row) for item in lines}

    def window_lines(self, batch_id: str) -> list[WindowLines]:
        return [window_file.read(self.store.get(row.line_nos_key)) for row in self.rows(Window, batch_id)]

    def garbage(self) -> set[str]:
        with self.db.reading() as session:
            return set(session.scalars(select(Garbage.s3_key)))

    def objects(self, batch_id: str) -> set[str]:
        return {key for key, _ in self.store.list_keys(f"{keys.BATCHES}{batch_id}/")}

    def balance(self, account: str) -> int:
        with self.db.reading() as session:
            total = func.coalesce(func.sum(LedgerEntry.amount_nanos), 0)
            return int(session.scalar(select(total).where(LedgerEntry.account == account)) or 0)


def make_planned(settings: Settings, model_path: Path, text_loader: Callable[[str], TextModel] = load_text) -> Planned:
    """Fresh tables and bucket, the model "tiny" with an alias pinned by every batch, the shipped prices."""
    db, store = Database(settings.database_url), ObjectStore(settings)
    tables.metadata.create_all(db.engine)
    store.ensure_bucket()
    text = load_text(str(model_path))
    with db.transaction() as session:
        session.add(Project(id=PROJECT, name="p", salt="s", created_ms=now_ms()))
        models.register(session, "tiny", str(model_path), digest=text.meta.digest, context_tokens=CONTEXT_TOKENS)
        models.register(session, "second", str(model_path), digest=text.meta.digest, context_tokens=CONTEXT_TOKENS)
        billing.seed_prices(session)
    return Planned(PlanContext(db, store, settings, lambda path: text_loader(path)), text)
