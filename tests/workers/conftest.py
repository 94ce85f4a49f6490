"""Fixtures of the workers: a migrated database, a bucket, and batches that are planned by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from batchsvc import ids
from batchsvc.accounts import service as accounts
from batchsvc.batches import part_file, unit_file, window_file
from batchsvc.batches.lifecycle import Status
from batchsvc.batches.tables import Batch, Part, Unit, Window
from batchsvc.billing import service as billing
from batchsvc.billing.tables import LedgerEntry, LedgerTransaction, UsageRow
from batchsvc.clock import now_ms
from batchsvc.db.session import Database
from batchsvc.files.tables import File
from batchsvc.settings import Settings
from batchsvc.store import keys
from batchsvc.store.s3 import ObjectStore
from batchsvc.tables import metadata
from engine.load.meta import read_meta
from tests import servers
from tests.tiny import make_tiny_model

DIGEST = "d" * 64
RATES = {"input": 10_000_000, "cached_input": 2_500_000, "output": 40_000_000}
FAST = {"lease_s": 3.0, "renew_s": 0.5, "reaper_s": 0.5, "poll_s": 0.3, "flush_s": 0.5, "term_grace_s": 6.0}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A tiny model and its digest."""
    path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return path, read_meta(path).digest


@pytest.fixture
def fast(settings: Settings) -> Settings:
    """Settings with short leases and ticks."""
    return settings.model_copy(update=FAST)


@pytest.fixture
def sqlite_settings(tmp_path: Path, redis_url: str, s3_server: servers.S3Server, bucket: str) -> Settings:
    """Short leases on SQLite alone, for tests whose subject isn't the database."""
    return Settings.from_env(
        {
            "DATABASE_URL": f"sqlite:///{tmp_path / 'test.sqlite3'}",
            "REDIS_URL": redis_url,
            "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": s3_server.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
            "BATCHSVC_SECRET_KEY": servers.SECRET_KEY,
            "BATCHSVC_BUCKET": bucket,
        }
    ).model_copy(update=FAST)


def tenant_of(session: Session, project: str) -> str:
    """The id of a project that is given by id or by name; a name is made on first use."""
    if project.startswith("proj_"):
        return project
    return (accounts.project_named(session, project) or accounts.create_project(session, project)).id


@dataclass
class World:
    """A database and a bucket, with what tests do to them."""

    settings: Settings
    db: Database
    store: ObjectStore
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})  # of the lines of new batches
    stem: tuple[int, ...] = (1, 2, 3)  # what their prompts begin with

    def add_batch(
        self,
        num_lines: int = 12,
        unit_lines: int = 4,
        *,
        windows: int = 1,
        digest: str = DIGEST,
        max_tokens: int = 4,
        expires_in_s: float = 3600,
        fold: int = 1,
        priority_s: float = 0,
        project: str = "tests",
        est_tokens: int = 0,
        reserved_nanos: int = 10**9,
        max_cost_nanos: int | None = None,
        on_quota: str = "wait",
    ) -> str:
        """A batch in progress: `num_lines` lines a window, cut into units of `est_tokens`, `fold` lines a row."""
        batch_id, now = ids.batch_id(), now_ms()
        with self.db.transaction() as session:
            project_id = tenant_of(session, project)
            billing.seed_prices(session)
        with self.db.transaction() as session:
            batch = Batch(
                id=batch_id,
                project_id=project_id,
                api_key_id="key",
                endpoint="/v1/chat/completions",
                input_file_id="file-x",
                completion_window="24h",
                tier="batch_24h",
                status=Status.IN_PROGRESS,
                created_ms=now,
                in_progress_ms=now,
                expires_ms=now + round((expires_in_s - priority_s) * 1000),
                model_id="tiny",
                model_digest=digest,
                price_version=1,
                rates={"tier": RATES, "standard": {name: 2 * rate for name, rate in RATES.items()}},
                reserved_nanos=reserved_nanos,
                max_cost_nanos=max_cost_nanos,
                on_quota=on_quota,
                total=num_lines * windows,
            )
            session.add(batch)
            session.flush()
            billing.post_reserve(session, batch)
            unit_no = 0
            for window_no in range(windows):
                first = window_no * num_lines + 1
                line_nos = list(range(first, first + num_lines))
                key = keys.window_lines(batch_id, 1, window_no)
                self.store.put(key, window_file.write(window_file.WindowLines(line_nos, [f"c{n}" for n in line_nos])))
                session.add(
                    Window(
                        batch_id=batch_id,
                        no=window_no,
                        first_line=first,
                        last_line=first + num_lines - 1,
                        num_lines=num_lines,
                        line_nos_key=key,
                    )
                )
                # plan order isn't input order
                planned = sorted(line_nos, key=lambda n: hashlib.sha256(str(n).encode()).digest())
                for start in range(0, num_lines, unit_lines):
                    unit = self._unit(batch, window_no, unit_no, planned[start : start + unit_lines], max_tokens, fold)
                    unit.est_tokens = est_tokens
                    session.add(unit)
                    unit_no += 1
        return batch_id

    def _unit(self, batch: Batch, window_no: int, no: int, line_nos: Sequence[int], max_tokens: int, fold: int) -> Unit:
        rows = [
            unit_file.UnitRow(
                line_nos=tuple(line_nos[start : start + fold]),
                custom_ids=tuple(f"c{n}" for n in line_nos[start : start + fold]),
                prompt_ids=np.array([*self.stem, 4 + line_nos[start] % 50], np.int32),
                params=self.params,
                planned_cached_tokens=1,
                max_tokens=max_tokens,
            )
            for start in range(0, len(line_nos), fold)
        ]
        data = unit_file.write(rows, [(len(self.stem), "", 1)])  # as if the next unit shared the common beginning
        key = keys.unit(batch.id, 1, no)
        self.store.put(key, data)
        return Unit(
            id=ids.unit_id(),
            batch_id=batch.id,
            project_id=batch.project_id,
            model_digest=batch.model_digest,
            window_no=window_no,
            no=no,
            s3_key=key,
            sha256=hashlib.sha256(data).hexdigest(),
            num_lines=len(line_nos),
            state="ready",
            done_bitmap=bytes((len(line_nos) + 7) // 8),
        )

    def batch(self, batch_id: str) -> Batch:
        with self.db.reading() as session:
            return session.get_one(Batch, batch_id)

    def units(self, batch_id: str) -> list[Unit]:
        with self.db.reading() as session:
            return list(session.scalars(select(Unit).where(Unit.batch_id == batch_id).order_by(Unit.no)))

    def parts(self, batch_id: str) -> list[Part]:
        with self.db.reading() as session:
            return list(session.scalars(select(Part).where(Part.batch_id == batch_id)))

    def set_units(self, batch_id: str, **values: Any) -> None:
        with self.db.transaction() as session:
            for unit in session.scalars(select(Unit).where(Unit.batch_id == batch_id, Unit.state != "done")):
                for name, value in values.items():
                    setattr(unit, name, value)

    def set_batch(self, batch_id: str, **values: Any) -> None:
        with self.db.transaction() as session:
            batch = session.get_one(Batch, batch_id)
            for name, value in values.items():
                setattr(batch, name, value)

    def mix(self, batch_id: str, other: str, *, every: int = 3) -> None:
        """Make a batch one whose lines name their models: every so manieth unit is of this other digest."""
        rates = self.batch(batch_id).rates or {}
        dear = {book: {kind: 10 * rate for kind, rate in of.items()} for book, of in rates.items()}
        pins = {"a": {"digest": DIGEST, "rates": rates}, "b": {"digest": other, "rates": dear}}
        self.set_batch(batch_id, model_id=None, model_digest=None, rates=None, models=pins)
        with self.db.transaction() as session:
            for unit in session.scalars(select(Unit).where(Unit.batch_id == batch_id)):
                unit.model_id, unit.model_digest = ("a", DIGEST) if unit.no % every else ("b", other)

    def result(self, batch_id: str, kind: str) -> list[dict[str, Any]]:
        """Lines of a published file; none if the batch has no such file."""
        import orjson

        batch = self.batch(batch_id)
        file_id = batch.output_file_id if kind == "output" else batch.error_file_id
        if file_id is None:
            return []
        with self.db.reading() as session:
            row = session.get_one(File, file_id)
        data = self.store.get(row.s3_key)
        assert len(data) == row.size_bytes and hashlib.sha256(data).hexdigest() == row.sha256
        assert row.filename == f"{batch_id}_{kind}.jsonl" and row.purpose == "batch_output"
        return [orjson.loads(line) for line in data.splitlines()]

    def judge(self, batch_id: str, status: Status) -> None:
        """The invariants of an ended batch (job-queue.md 5.3): each line once, in order, and the bill equal to it."""
        batch = self.batch(batch_id)
        assert batch.status == status == batch.why and batch.ended_ms
        output, error = self.result(batch_id, "output"), self.result(batch_id, "error")
        for lines in (output, error):
            assert [line["line"] for line in lines] == sorted(line["line"] for line in lines), "input order"
        assert sorted(line["line"] for line in output + error) == list(range(1, batch.total + 1)), "each line once"
        assert all(line["custom_id"] == f"c{line['line']}" for line in output + error)
        assert (batch.completed, batch.failed) == (len(output), len(error))
        usage = [line["response"]["body"]["usage"] for line in output]
        bill = sum(line["cost_nanos"] for line in usage)
        assert batch.cost_nanos == bill
        tokens = [sum(counts) for counts in zip(*map(part_file.usage_of, usage), strict=True)] or [0, 0, 0]
        assert [batch.input_tokens, batch.cached_tokens, batch.output_tokens] == tokens
        with self.db.reading() as session:
            rows = session.scalars(select(UsageRow).where(UsageRow.batch_id == batch_id)).all()
            assert sum(row.cost_nanos for row in rows) == bill
            entries = session.execute(
                select(LedgerTransaction.kind, LedgerTransaction.part_id, LedgerEntry.account, LedgerEntry.amount_nanos)
                .join(LedgerEntry, LedgerEntry.transaction_id == LedgerTransaction.id)
                .where(LedgerTransaction.batch_id == batch_id)
            ).all()
        assert sum(entry.amount_nanos for entry in entries) == 0
        assert sum(entry.amount_nanos for entry in entries if entry.account == "revenue") == bill
        held = [entry.amount_nanos for entry in entries if entry.account.startswith("reserved:")]
        assert sum(held) == 0, "the reservation is released"
        assert {unit.state for unit in self.units(batch_id)} <= {"done", "sealed"}


def open_world(settings: Settings) -> Iterator[World]:
    db, store = Database(settings.database_url), ObjectStore(settings)
    metadata.create_all(db.engine)
    stamp(db)
    store.ensure_bucket()
    yield World(settings, db, store)
    db.dispose()


def stamp(db: Database) -> None:
    """Processes start on the schema of this version alone, and the tables in code are that (test_migrations.py)."""
    with db.transaction() as session:
        session.execute(
            text("CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
        )
        session.execute(
            text("INSERT INTO alembic_version SELECT :head WHERE NOT EXISTS (SELECT 1 FROM alembic_version)"),
            {"head": _head()},
        )


@cache
def _head() -> str:
    return max(path.name[:4] for path in Path(str(files("migrations"))).glob("versions/[0-9]*.py"))


@pytest.fixture
def world(fast: Settings) -> Iterator[World]:
    """On both databases."""
    yield from open_world(fast)


@pytest.fixture
def sqlite_world(sqlite_settings: Settings) -> Iterator[World]:
    yield from open_world(sqlite_settings)
