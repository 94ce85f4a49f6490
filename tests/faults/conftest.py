"""Fixtures of the fault tests: services of the session, a cluster a test, the judge, and a seed that is told."""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from batchsvc.db import migrate
from engine.load.meta import read_meta
from tests import servers
from tests.faults import judge as judging
from tests.faults.cluster import Cluster, Services, TinyModel
from tests.faults.roles import PRELOAD
from tests.faults.scraping import Scraper
from tests.tiny import make_tiny_model

SEED = os.environ.get("FAULT_SEED") or str(secrets.randbelow(10**9))
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Every random choice of a fault: FAULT_SEED and the test's name decide them all."""
    print(f"FAULT_SEED={SEED} repeats this")
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(scope="session")
def spawn() -> ForkServerContext:
    """Forks processes from one that has the code imported and nothing started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    meta = read_meta(path)
    return TinyModel(path=path, digest=meta.digest, context_tokens=meta.context_tokens)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database file, to be copied."""
    path = tmp_path_factory.mktemp("sqlite") / "template.sqlite3"
    migrate.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres_url: str) -> Iterator[str]:
    """The name of a migrated database on the server, to be copied."""
    with servers.fresh_database(postgres_url) as url:
        migrate.upgrade(url)
        yield url.partition("?")[0].rpartition("/")[2]


@pytest.fixture
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh, migrated database: SQLite unless the test asks for "postgresql"."""
    if getattr(request, "param", "sqlite") == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "test.sqlite3")
        yield f"sqlite:///{tmp_path / 'test.sqlite3'}"
        return
    maintenance = request.getfixturevalue("postgres_url")
    template, name = request.getfixturevalue("postgres_template"), "t_" + secrets.token_hex(6)
    admin = create_engine(maintenance.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    base, _, query = maintenance.partition("?")
    yield base.rsplit("/", 1)[0] + f"/{name}" + (f"?{query}" if query else "")
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def services(database_url: str, redis_url: str, s3_server: servers.S3Server, bucket: str) -> Services:
    return Services(
        database_url=database_url,
        redis_url=redis_url,
        s3_endpoint=s3_server.endpoint,
        s3_access_key=s3_server.access_key,
        s3_secret_key=s3_server.secret_key,
        bucket=bucket,
    )


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest,
    services: Services,
    tiny: TinyModel,
    tmp_path: Path,
    rng: random.Random,
    spawn: ForkServerContext,
) -> Iterator[Cluster]:
    made = Cluster(services, tiny, tmp_path, rng, spawn.Process)
    made.wipe_redis()
    yield made
    made.close()
    if request.node.stash.get(_FAILED, False):
        made.show_logs()


@pytest.fixture
def scraper(cluster: Cluster) -> Iterator[Scraper]:
    """A Prometheus over this cluster's processes."""
    with closing(Scraper(cluster)) as made:
        yield made


@pytest.fixture
def judge(cluster: Cluster) -> Callable[..., judging.Verdict]:
    """The judge of this cluster's jobs."""
    return partial(judging.judge, cluster)
