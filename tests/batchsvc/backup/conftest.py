"""Two deployments for tests of backups: one with work in it, and a fresh one on the same kind of database."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from batchsvc.cli.app import app
from batchsvc.db.session import Database
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from tests import servers
from tests.workers.conftest import FAST, World

Env = dict[str, str]
Command = Callable[..., Result]


def environment(database_url: str, redis_url: str, s3_server: servers.S3Server, bucket: str) -> Env:
    return {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
        "BATCHSVC_SECRET_KEY": servers.SECRET_KEY,
        "BATCHSVC_BUCKET": bucket,
    }


@pytest.fixture
def here(migrated_url: str, redis_url: str, s3_server: servers.S3Server, bucket: str) -> Env:
    """The settings of a deployment with the newest schema."""
    return environment(migrated_url, redis_url, s3_server, bucket)


@pytest.fixture
def there(
    request: pytest.FixtureRequest, here: Env, tmp_path: Path, redis_url: str, s3_server: servers.S3Server
) -> Iterator[Env]:
    """The settings of a deployment of which there is nothing yet."""
    name = "t" + secrets.token_hex(8)
    if here["DATABASE_URL"].startswith("sqlite"):
        env = environment(f"sqlite:///{tmp_path / 'there.sqlite3'}", redis_url, s3_server, name)
        yield env
    else:
        with servers.fresh_database(request.getfixturevalue("postgres_url")) as url:
            env = environment(url, redis_url, s3_server, name)
            yield env
    store = ObjectStore(Settings.from_env(env))
    store.ensure_bucket()
    store._client.delete_bucket(Bucket=name)  # SeaweedFS takes its objects along


@pytest.fixture
def world(here: Env) -> Iterator[World]:
    yield from opened(here)


def opened(env: Env) -> Iterator[World]:
    """A deployment by its settings."""
    settings = Settings.from_env(env).model_copy(update=FAST)
    db, store = Database(settings.database_url), ObjectStore(settings)
    store.ensure_bucket()
    yield World(settings, db, store)
    db.dispose()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `batchsvc` with the settings of a deployment; `path` is its PATH."""

    def run(env: Env, *words: object, path: str | None = None) -> Result:
        with monkeypatch.context() as patched:
            for name, value in env.items():
                patched.setenv(name, value)
            patched.setenv("PATH", os.environ["PATH"] if path is None else path)
            return CliRunner().invoke(app, [str(word) for word in words])

    return run
