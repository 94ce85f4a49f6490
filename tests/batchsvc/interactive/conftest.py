"""Pieces of a stack for interactive calls: an API on a socket, workers with the fake engine, the official client."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
import structlog
from sqlalchemy import func, select

from batchsvc.accounts import administration
from batchsvc.accounts import service as accounts
from batchsvc.audit.actor import at_command_line
from batchsvc.batches import models
from batchsvc.billing import service as billing
from batchsvc.billing.tables import CallHold, LedgerEntry, LedgerTransaction, UsageRow
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from engine.fake import FakeEngine
from engine.request import Request, StepOutput
from engine.text import TextModel, load_text
from tests.dispatchers import NullDispatcher
from tests.serving import serving
from tests.tiny import make_tiny_model
from workers.pump import EngineLike
from workers.step import EngineRun

MODEL = "tiny"
LIVENESS_S = 30


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIVENESS_S} s: {what}"
        time.sleep(0.02)


class WatchedEngine(FakeEngine):
    """Remembers what it was asked to run and to abort."""

    def __init__(self, text: TextModel, **arguments: Any) -> None:
        super().__init__(text, **arguments)
        self.requests: list[Request] = []
        self.aborted: list[str] = []

    def add(self, request: Request) -> None:
        self.requests.append(request)
        super().add(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        super().abort(request_id)


class Held(WatchedEngine):
    """Runs no step while it is held."""

    def __init__(self, text: TextModel, **arguments: Any) -> None:
        super().__init__(text, **arguments)
        self.goes = threading.Event()

    def step(self) -> StepOutput:
        self.goes.wait(LIVENESS_S)
        return super().step()


@dataclass
class Place:
    """A database with a project and its key, an API process, and what tests do with them."""

    settings: Settings
    db: Database
    text: TextModel
    digest: str
    project_id: str
    key: str
    url: str = ""
    clients: list[Any] = field(default_factory=list)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))

    def client(self, key: str | None = None, **arguments: Any) -> openai.OpenAI:
        """The official client; it never retries, so that a test sees each answer."""
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0, **arguments)
        self.clients.append(made)
        return made

    def chat(self, client: openai.OpenAI | None = None, *, text: str = "Where is my parcel?", **body: Any) -> Any:
        """A short chat."""
        body = {"max_tokens": 12, "temperature": 0} | body
        messages = [{"role": "user", "content": text}]
        return (client or self.client()).chat.completions.create(model=MODEL, messages=messages, **body)

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        """A plain call, for what the official client hides."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | body
        headers = {"Authorization": f"Bearer {self.key}"}
        return self.http.post(self.url + path, json=body, headers=headers)

    @contextmanager
    def worker(self, engine: EngineLike | None = None, *, name: str = "w", **changes: Any) -> Iterator[EngineRun]:
        """An engine worker in this process."""
        settings = self.settings.model_copy(update={"poll_s": 60.0, "term_grace_s": 3.0, **changes})
        run = EngineRun(
            settings,
            Database(settings.database_url),
            ObjectStore(settings),
            NullDispatcher(),
            engine or WatchedEngine(self.text),
            digest=self.digest,
            owner=f"host:1:{name}",
            on_failure=lambda: None,
        )
        run.start()
        try:
            yield run
        finally:
            run.signalled()
            run.signalled()
            run.drain()

    def new_project(self, **changes: Any) -> tuple[str, str]:
        """Another tenant: its id and its key."""
        with self.db.transaction() as session:
            project_id = accounts.create_project(session, f"p{time.monotonic_ns()}").id
            administration.change_project(session, at_command_line(), project_id, changes)
            return project_id, accounts.create_key(session, project_id, "test")[1]

    def num_used(self) -> int:
        """How many calls of the first project were billed."""
        return len(self.usage())

    def usage(self, project_id: str | None = None) -> list[UsageRow]:
        with self.db.reading() as session:
            mine = select(UsageRow).where(UsageRow.project_id == (project_id or self.project_id))
            return list(session.scalars(mine.order_by(UsageRow.created_ms)))

    def holds(self) -> int:
        with self.db.reading() as session:
            return session.scalar(select(func.count()).select_from(CallHold)) or 0

    def revenue_nanos(self, project_id: str | None = None) -> int:
        """What the ledger says was charged; its entries must sum to 0."""
        with self.db.reading() as session:
            rows = session.execute(
                select(LedgerEntry.account, LedgerEntry.amount_nanos)
                .join(LedgerTransaction, LedgerTransaction.id == LedgerEntry.transaction_id)
                .where(
                    LedgerTransaction.project_id == (project_id or self.project_id), LedgerTransaction.kind == "call"
                )
            ).all()
        assert sum(row.amount_nanos for row in rows) == 0
        return sum(row.amount_nanos for row in rows if row.account == "revenue")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of this package's own."""
    return make_tiny_model(tmp_path_factory.mktemp("interactive"), seed=7)


@pytest.fixture
def calls_redis(redis_url: str) -> str:
    """An empty database of the shared Redis."""
    return _emptied(redis_url, 3)


def _emptied(redis_url: str, number: int) -> str:
    url = redis_url.removesuffix("/0") + f"/{number}"
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
def sqlite_url(tmp_path: Path, migrated_sqlite: Path) -> str:
    return f"sqlite:///{shutil.copy(migrated_sqlite, tmp_path / 'test.sqlite3')}"


def call_settings(database_url: str, redis_url: str, **changes: Any) -> Settings:
    """Settings without a store: calls need none."""
    env = {"DATABASE_URL": database_url, "REDIS_URL": redis_url, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    return Settings.from_env(env).model_copy(update=changes)


@contextmanager
def opened(settings: Settings, tiny: Path) -> Iterator[Place]:
    """A place on a migrated database, whose triggers keep hours and balances."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    db, text = Database(settings.database_url), load_text(tiny)
    with db.transaction() as session:
        billing.seed_prices(session)
        models.register(session, MODEL, str(tiny), digest=text.meta.digest, context_tokens=text.meta.context_tokens)
        project_id = accounts.create_project(session, "tests").id
        key = accounts.create_key(session, project_id, "test", is_admin=True)[1]
    place = Place(settings, db, text, text.meta.digest, project_id, key)
    with serving(settings, NullDispatcher()) as url:
        place.url = url
        yield place
        for client in (*place.clients, place.http):
            client.close()
    db.dispose()


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path, redis_url: str, tiny: Path
) -> Iterator[Place]:
    """One for the tests of a module, in a database of Redis of its own."""
    database = shutil.copy(migrated_sqlite, tmp_path_factory.mktemp("place") / "test.sqlite3")
    with opened(call_settings(f"sqlite:///{database}", _emptied(redis_url, 4)), tiny) as made:
        yield made
