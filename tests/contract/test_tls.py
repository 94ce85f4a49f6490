"""Redis and S3 are reached by TLS as README's table says, and refused where nobody we trust signed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from batchsvc.dispatch import CeleryDispatcher, queue_of
from batchsvc.errors import ServiceError
from batchsvc.settings import Settings
from batchsvc.store.s3 import ObjectStore
from tests.certificates import in_front_of, written
from tests.e2e.conftest import wait_for
from tests.servers import S3Server


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path)


@pytest.fixture
def tls_redis_url(redis_url: str, certificate: tuple[Path, Path]) -> Iterator[str]:
    parts = urlsplit(redis_url)
    assert parts.port is not None
    with in_front_of(parts.port, *certificate) as port:
        yield f"rediss://:{parts.password}@127.0.0.1:{port}/0?ssl_ca_certs={certificate[0]}&ssl_cert_reqs=required"


def test_the_queue_is_reached_by_tls(tls_redis_url: str) -> None:
    Settings.from_env({"DATABASE_URL": "sqlite:///x", "REDIS_URL": tls_redis_url})
    digest = "tls" + "0" * 61
    dispatcher = CeleryDispatcher(tls_redis_url)
    dispatcher.ticket(digest, 2)
    wait_for(lambda: dispatcher.waiting(queue_of(digest)) == 2, "two tickets in the queue")
    dispatcher.close()


def test_nobody_elses_certificate_will_do(tls_redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, _ = written(tmp_path / "other")
    start, _, rest = tls_redis_url.partition("ssl_ca_certs=")
    dispatcher = CeleryDispatcher(f"{start}ssl_ca_certs={other}&{rest.partition('&')[2]}")
    assert dispatcher.waiting("q") is None
    dispatcher.close()


def test_the_store_is_reached_by_tls(
    s3_server: S3Server, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_front_of(s3_server.ports["s3"], *certificate) as port:
        settings = Settings.from_env(
            {
                "DATABASE_URL": "sqlite:///x",
                "REDIS_URL": "redis://x",
                "AWS_ENDPOINT_URL_S3": f"https://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": s3_server.access_key,
                "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
                "BATCHSVC_BUCKET": "reached-by-tls",
            }
        )
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate[0]))
        store = ObjectStore(settings)
        store.ensure_bucket()
        store.put("k", b"by TLS")
        assert store.get("k") == b"by TLS"
        monkeypatch.delenv("AWS_CA_BUNDLE")
        with pytest.raises(ServiceError):
            ObjectStore(settings).put("k", b"to whom?")
