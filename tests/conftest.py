"""Fixtures: the real servers, one of each a session; a fresh bucket and database a test."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from hypothesis import settings as hypothesis_settings

from batchsvc.db import migrate
from batchsvc.settings import Settings
from tests import servers, tenant_store

# a slow machine is no defect: examples have no deadline, the test has
hypothesis_settings.register_profile("batchsvc", deadline=None)
hypothesis_settings.load_profile("batchsvc")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with servers.start_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    with servers.start_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def tenant_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    """Another S3 server than ours, with other keys."""
    with servers.start_s3(tmp_path_factory.mktemp("tenant-s3")) as server:
        yield server


@pytest.fixture
def tenant(tenant_server: servers.S3Server) -> Iterator[tenant_store.Tenant]:
    """A bucket of a tenant."""
    with tenant_store.made(tenant_server, "tenant-" + secrets.token_hex(6)) as made:
        yield made


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with servers.start_postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh, empty database: the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.sqlite3'}"
        return
    with servers.fresh_database(request.getfixturevalue("postgres_url")) as url:
        yield url


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with the newest schema, to copy: triggers included, which tables in code don't bring."""
    path = tmp_path_factory.mktemp("migrated") / "test.sqlite3"
    migrate.upgrade(f"sqlite:///{path}")
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=DELETE")  # so that the one file is all of it
    connection.close()
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_url: str) -> Iterator[str]:
    """Name of a database with the newest schema, to copy."""
    with servers.fresh_database(postgres_url) as url:
        migrate.upgrade(url)
        yield url.partition("?")[0].rsplit("/", 1)[1]


@pytest.fixture(params=["sqlite", "postgresql"])
def migrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database with the newest schema: as `database_url`, for tests that need migrations and no others."""
    if request.param == "sqlite":
        copied = shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / "test.sqlite3")
        yield f"sqlite:///{copied}"
        return
    template = request.getfixturevalue("migrated_postgres")
    with servers.fresh_database(request.getfixturevalue("postgres_url"), template) as url:
        yield url


@pytest.fixture
def bucket(s3_server: servers.S3Server) -> Iterator[str]:
    """The name of a bucket of the test's own; it goes with the test, because the server holds about 75 at once."""
    name = "t" + secrets.token_hex(8)
    yield name
    client = boto3.client(
        "s3",
        endpoint_url=s3_server.endpoint,
        aws_access_key_id=s3_server.access_key,
        aws_secret_access_key=s3_server.secret_key,
        region_name="us-east-1",
    )
    with contextlib.suppress(client.exceptions.NoSuchBucket):
        client.delete_bucket(Bucket=name)  # SeaweedFS takes its objects along


@pytest.fixture
def settings(database_url: str, redis_url: str, s3_server: servers.S3Server, bucket: str) -> Settings:
    """Settings of a deployment on the real servers, with a bucket of its own."""
    return Settings.from_env(
        {
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": s3_server.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
            "BATCHSVC_SECRET_KEY": servers.SECRET_KEY,
            "BATCHSVC_BUCKET": bucket,
        }
    )
