"""PostgreSQL, Redis and S3 are reached by TLS as README's table says, and refused where nobody we trust signed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from sqlalchemy import text

from batchsvc.db.session import Database
from batchsvc.dispatch import CeleryDispatcher, queue_of
from batchsvc.errors import ServiceError
from batchsvc.settings import Settings
from batchsvc.stack import services
from batchsvc.store.s3 import ObjectStore
from tests.certificates import in_front_of, written
from tests.e2e.conftest import BATCHSVC, wait_for
from tests.faults.targets import postgres_target
from tests.servers import S3Server, fresh_database, running

README = Path(__file__).parents[2] / "README.md"


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


@pytest.fixture
def tls_postgres(postgres_url: str, certificate: tuple[Path, Path]) -> Iterator[str]:
    """The URL of a fresh database behind a server that takes nobody without TLS; what it says of TLS is left out."""
    with fresh_database(postgres_url) as url:
        server, parts = postgres_target(url), urlsplit(url)
        with in_front_of(server if isinstance(server, str) else server[1], *certificate, is_postgres=True) as port:
            yield f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}"


@pytest.fixture
def by_readme(tmp_path: Path) -> Path:
    """A folder with a CA and a certificate for 127.0.0.1 that it signed, made by the commands of README."""
    line = re.search(
        "^A certificate for a host by your own CA: (.+)$", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert line is not None
    made = re.findall(r"`(openssl [^`]+)`", line[1])
    assert len(made) == 2
    (folder := tmp_path / "by-readme").mkdir()
    for words in made:
        here = words.replace("10.0.0.1", "127.0.0.1").replace("/CN=HOST", "/CN=127.0.0.1")
        subprocess.run(shlex.split(here), cwd=folder, capture_output=True, check=True)
    return folder


def command(words: str, url: str) -> subprocess.CompletedProcess[str]:
    """What a command says on a deployment with this database."""
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= {"DATABASE_URL": url, "REDIS_URL": "redis://127.0.0.1:9/0"}
    return subprocess.run([*BATCHSVC, *words.split()], env=env, capture_output=True, text=True, check=False)


def test_the_database_is_reached_by_tls(tls_postgres: str, certificate: tuple[Path, Path]) -> None:
    """Schema, keys and a connection of the service, with the parameters of README's table."""
    url = f"{tls_postgres}?sslmode=verify-full&sslrootcert={certificate[0]}"
    for words in ("db upgrade --from-env", "keys create first --from-env"):
        done = command(words, url)
        assert done.returncode == 0, done.stderr
    database = Database(url)
    with database.reading() as session:
        driver = session.connection().connection.driver_connection
        assert isinstance(driver, psycopg.Connection) and driver.pgconn.ssl_in_use
        assert driver.info.get_parameters()["sslmode"] == "verify-full"
    database.dispose()


@pytest.mark.parametrize(
    ("words", "host", "authority", "says"),
    [
        ("serve control", "127.0.0.1", "other", "certificate verify failed"),
        ("serve api", "127.0.0.1", "other", "certificate verify failed"),
        ("db upgrade --from-env", "127.0.0.1", "other", "certificate verify failed"),
        ("keys list --from-env", "localhost", "ours", 'does not match host name "localhost"'),
        ("db upgrade --from-env", "127.0.0.1", "nobody", "does not exist"),
    ],
)
def test_a_database_whose_certificate_will_not_do_is_refused_in_a_sentence(
    words: str, host: str, authority: str, says: str, tls_postgres: str, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """With the reason. Nothing is tried without TLS, or without the check."""
    (tmp_path / "other").mkdir()
    trusted = {"ours": certificate[0], "other": written(tmp_path / "other")[0], "nobody": tmp_path / "nobody.pem"}
    url = f"{tls_postgres.replace('127.0.0.1', host)}?sslmode=verify-full&sslrootcert={trusted[authority]}"
    refused = command(words, url)
    assert refused.returncode == 1 and refused.stdout == ""
    assert refused.stderr.count("\n") == 1 and "The database doesn't answer" in refused.stderr
    assert says in refused.stderr


def test_a_certificate_made_as_readme_says_opens_database_and_store(
    postgres_url: str, by_readme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SeaweedFS with the flags of README's table; for PostgreSQL what its own settings do is done before it."""
    authority, certificate, key = (by_readme / name for name in ("ca.pem", "host.pem", "host.key"))
    server, name = postgres_target(postgres_url), urlsplit(postgres_url).path
    with in_front_of(server if isinstance(server, str) else server[1], certificate, key, is_postgres=True) as port:
        user = urlsplit(postgres_url).username
        database = Database(f"postgresql://{user}@127.0.0.1:{port}{name}?sslmode=verify-full&sslrootcert={authority}")
        with database.reading() as session:
            assert session.scalar(text("SELECT 1")) == 1
        database.dispose()
    ports = services.choose_ports((*services.WEED_PORTS, "https"))
    keys = {"access_key": "tls", "secret_key": "tls-secret-key"}
    weed = services.seaweedfs(tmp_path / "s3", ports=ports, jwt_key="j" * 40, **keys)
    flags = (f"-s3.port.https={ports['https']}", f"-s3.cert.file={certificate}", f"-s3.key.file={key}")
    assert all(flag.partition("=")[0] in README.read_text(encoding="utf-8") for flag in flags)
    settings = Settings.from_env(
        {
            "DATABASE_URL": "sqlite:///x",
            "REDIS_URL": "redis://x",
            "AWS_ENDPOINT_URL_S3": f"https://127.0.0.1:{ports['https']}",
            "AWS_ACCESS_KEY_ID": keys["access_key"],
            "AWS_SECRET_ACCESS_KEY": keys["secret_key"],
            "BATCHSVC_BUCKET": "reached-by-tls",
        }
    )
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
    with running(replace(weed, argv=(*weed.argv, *flags)), lambda: services.seaweedfs_is_ready(ports), "seaweedfs"):
        store = ObjectStore(settings)
        store.ensure_bucket()
        store.put("k", b"by TLS")
        assert store.get("k") == b"by TLS"
