"""A real API server for contract tests: uvicorn on loopback, real S3 and Redis, once on each database."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import openai
import pytest
import structlog

from batchsvc.accounts import service as accounts
from batchsvc.batches import models
from batchsvc.billing import service as billing
from batchsvc.db import migrate
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from tests import servers
from tests.dispatchers import NullDispatcher
from tests.serving import serving

MODEL = "tiny-test-model"
DIGEST = "ab" * 32
# of tests to which the database is no part: what it may do otherwise is tested elsewhere
on_sqlite = pytest.mark.parametrize("server", ["sqlite"], indirect=True)


class Recorder(NullDispatcher):
    """Remembers what was sent, so that a test sees that a message left, and left after the commit."""

    def __init__(self) -> None:
        self.planned: list[str] = []
        self.finalized: list[str] = []

    def plan(self, batch_id: str) -> None:
        self.planned.append(batch_id)

    def finalize(self, batch_id: str) -> None:
        self.finalized.append(batch_id)


@dataclass
class Api:
    """A running server with one project, its key and the admin key."""

    url: str
    settings: Settings
    db: Database
    store: ObjectStore
    sent: Recorder
    project_id: str = ""
    key: str = ""
    admin_key: str = ""
    clients: list[openai.OpenAI] = field(default_factory=list)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60, trust_env=False))

    def client(self, key: str | None = None) -> openai.OpenAI:
        """The official client; it never retries, so that a test sees each answer."""
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0)
        self.clients.append(made)
        return made

    def call(self, method: str, path: str, key: str | None = "", **arguments: object) -> httpx.Response:
        """A plain HTTP call, with the project's key unless another (or None) is given."""
        headers = {} if key is None else {"Authorization": f"Bearer {key or self.key}"}
        headers |= arguments.pop("headers", {})
        return self.http.request(method, self.url + path, headers=headers, **arguments)

    def new_project(self) -> tuple[str, str]:
        """Another tenant: its project id and its key."""
        with self.db.transaction() as session:
            project = accounts.create_project(session, "other")
            return project.id, accounts.create_key(session, project.id, "test")[1]


@pytest.fixture(scope="session")
def sqlite_api(tmp_path_factory: pytest.TempPathFactory, redis_url: str, s3_server: servers.S3Server) -> Iterator[Api]:
    yield from _api(f"sqlite:///{tmp_path_factory.mktemp('api') / 'test.sqlite3'}", redis_url, s3_server)


@pytest.fixture(scope="session")
def postgresql_api(postgres_url: str, redis_url: str, s3_server: servers.S3Server) -> Iterator[Api]:
    with servers.fresh_database(postgres_url) as url:
        yield from _api(url, redis_url, s3_server)


@pytest.fixture(params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest) -> Api:
    """One server a database for all contract tests, started once; each test works in a project of its own."""
    made: Api = request.getfixturevalue(f"{request.param}_api")
    return made


def _api(database_url: str, redis_url: str, s3: servers.S3Server) -> Iterator[Api]:
    settings = Settings.from_env(
        {
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "AWS_ENDPOINT_URL_S3": s3.endpoint,
            "AWS_ACCESS_KEY_ID": s3.access_key,
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
            "BATCHSVC_SECRET_KEY": servers.SECRET_KEY,
            "BATCHSVC_BUCKET": "t" + secrets.token_hex(8),
            "BATCHSVC_MAX_INPUT_BYTES": str(24 * 1024 * 1024),
            "BATCHSVC_EGRESS_ALLOW": "127.0.0.0/8",
        }
    )
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    migrate.upgrade(database_url)
    store, db, sent = ObjectStore(settings), Database(database_url), Recorder()
    store.ensure_bucket()
    with db.transaction() as session:
        billing.seed_prices(session)
        models.register(session, MODEL, "/models/tiny", digest=DIGEST, context_tokens=2048)
    with serving(settings, sent) as url:
        made = Api(url, settings, db, store, sent)
        yield made
        made.http.close()
    db.dispose()


@pytest.fixture
def api(server: Api) -> Iterator[Api]:
    """The server, with a fresh project."""
    with server.db.transaction() as session:
        project = accounts.create_project(session, "test")
        server.project_id = project.id
        server.key = accounts.create_key(session, project.id, "test")[1]
        server.admin_key = accounts.create_key(session, project.id, "admin", is_admin=True)[1]
    yield server
    while server.clients:
        server.clients.pop().close()
