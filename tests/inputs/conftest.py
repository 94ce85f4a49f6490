"""One deployment for all of these tests, so that each costs little more than its batch."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsvc.settings import Settings
from tests import servers
from tests.batchsvc.batches.planned import CONTEXT_TOKENS
from tests.batchsvc.batches.quoting import quoting
from tests.inputs.service import Service
from tests.tiny import make_tiny_model
from tests.workers.conftest import FAST


@pytest.fixture(scope="package")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("inputs") / "tiny", context_tokens=CONTEXT_TOKENS)


@pytest.fixture(scope="package")
def service(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    migrated_sqlite: Path,
    redis_url: str,
    s3_server: servers.S3Server,
) -> Iterator[Service]:
    """Nothing runs unless a test says so."""
    path = shutil.copy(migrated_sqlite, tmp_path_factory.mktemp("inputs") / "test.sqlite3")
    settings = Settings.from_env(
        {
            "DATABASE_URL": f"sqlite:///{path}",
            "REDIS_URL": redis_url,
            "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": s3_server.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
            "BATCHSVC_SECRET_KEY": servers.SECRET_KEY,
            "BATCHSVC_BUCKET": "t" + secrets.token_hex(8),
        }
    ).model_copy(update=FAST | {"poll_s": 0.05, "flush_s": 0.1})
    with quoting(settings, tiny_model) as door:
        yield Service(door)


@pytest.fixture(scope="module")
def running(service: Service) -> Iterator[Service]:
    """With a worker whose engine is the fake one."""
    with service.working():
        yield service


@pytest.fixture(scope="module")
def answering(service: Service, tiny_model: Path) -> Iterator[Service]:
    """With a worker whose engine is the real one."""
    from engine.config import EngineConfig  # torch: only where a test needs it
    from engine.engine import Engine

    config = EngineConfig(
        model=str(tiny_model), weight_format="float32", kv_format="float32", threads=1, num_blocks=128
    )
    with service.working(Engine(config)):
        yield service
