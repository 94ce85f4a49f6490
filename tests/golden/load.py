"""Puts a golden data directory in place: SQLite as it was, PostgreSQL row by row, its objects into a bucket."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from sqlalchemy import JSON, Boolean, MetaData, text

from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.store.s3 import ObjectStore

ROOT = Path(__file__).parents[1] / "data" / "golden"
DATABASE, OBJECTS, ABOUT = "database.sqlite3.zst", "objects.tar.zst", "about.json"


@dataclass(frozen=True, kw_only=True)
class Golden:
    """A release's data directory. `batches`: role -> {id, custom_ids}; roles are told in make.py."""

    folder: Path
    release: str
    revision: str
    commit: str
    project_id: str
    model_digest: str
    invoice: str
    batches: dict[str, dict[str, Any]]

    @classmethod
    def every(cls) -> list[Golden]:
        """All of them, oldest first."""
        return [cls.of(path.parent) for path in sorted(ROOT.glob(f"*/{ABOUT}"))]

    @classmethod
    def of(cls, folder: Path) -> Golden:
        return cls(folder=folder, **json.loads((folder / ABOUT).read_text()))

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """Keys and contents of the bucket."""
        with tarfile.open(fileobj=io.BytesIO(_unpacked(self.folder / OBJECTS))) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                yield member.name, file.read()

    def load(self, database_url: str, store: ObjectStore, scratch: Path) -> None:
        """Make database and bucket as the release left them. Both must be empty."""
        store.ensure_bucket()
        for key, data in self.objects():
            store.put(key, data)
        data = _unpacked(self.folder / DATABASE)
        if database_url.startswith("sqlite"):
            Path(database_url.removeprefix("sqlite:///")).write_bytes(data)
            return
        old = scratch / f"golden-{self.release}.sqlite3"
        old.write_bytes(data)
        _fill_postgres(database_url, old, self.revision)

    def adopt(self, db: Database, *, model: Path, digest: str, receiver: str | None = None) -> None:
        """Tell an upgraded database where the model and the receiver of its webhooks are on this machine."""
        with db.transaction() as session:
            moved = {"path": str(model), "new": digest, "old": self.model_digest}
            session.execute(text("UPDATE models SET path = :path, digest = :new WHERE digest = :old"), moved)
            for table in ("batches", "units"):
                change = f"UPDATE {table} SET model_digest = :new WHERE model_digest = :old"
                session.execute(text(change), {"new": digest, "old": self.model_digest})
            if receiver:
                session.execute(text("UPDATE webhook_endpoints SET url = :url, open_until_ms = 0"), {"url": receiver})
                session.execute(text("UPDATE webhook_deliveries SET due_ms = 1 WHERE state = 'pending'"))


def _fill_postgres(database_url: str, old: Path, revision: str) -> None:
    """The rows of a SQLite file in a PostgreSQL database of the same revision; triggers have had their say already."""
    migrate.upgrade_to(database_url, revision)
    db = Database(database_url)
    source = sqlite3.connect(old)
    source.row_factory = sqlite3.Row
    known = MetaData()
    with db.engine.begin() as connection:
        known.reflect(connection)
        tables = [table for table in known.sorted_tables if table.name != "alembic_version"]
        names = ", ".join(table.name for table in tables)
        for table in tables:
            connection.execute(text(f"ALTER TABLE {table.name} DISABLE TRIGGER USER"))
        connection.execute(text(f"TRUNCATE {names}"))
        for table in tables:
            rows = [dict(row) for row in source.execute(f"SELECT * FROM {table.name}")]
            for column in table.columns:
                for row in rows:
                    if row[column.name] is None:
                        continue
                    if isinstance(column.type, Boolean):
                        row[column.name] = bool(row[column.name])
                    elif isinstance(column.type, JSON):
                        row[column.name] = json.loads(row[column.name])
            if rows:
                connection.execute(table.insert(), rows)
            connection.execute(text(f"ALTER TABLE {table.name} ENABLE TRIGGER USER"))
        for table, column in (("prices", "id"), ("ledger_transactions", "id"), ("ledger_entries", "id")):
            to = f"setval(pg_get_serial_sequence('{table}', '{column}'), (SELECT max({column}) FROM {table}))"
            connection.execute(text(f"SELECT {to}"))
    source.close()
    db.dispose()


def _unpacked(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
