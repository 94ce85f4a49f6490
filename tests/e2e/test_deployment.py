"""A deployment by settings alone (PostgreSQL, Redis, S3): each process by one command, then a job."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, text

from batchsvc.stack.services import choose_ports
from tests.e2e.conftest import BATCHSVC, FAST_SETTINGS, LIVENESS_S, CommandLine, line, read_lines, wait_for, write_lines
from tests.servers import S3Server

Deployment = tuple[str, dict[str, str]]


@pytest.fixture
def deployment(
    postgres_url: str, redis_url: str, s3_server: S3Server, tiny_model: str, tmp_path: Path
) -> Iterator[Deployment]:
    """The API's URL and the settings."""
    name = "t_" + secrets.token_hex(6)
    admin = create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    base, _, query = postgres_url.partition("?")
    port = choose_ports(("api",))["api"]
    password_file = tmp_path / "s3_secret"
    password_file.write_text(s3_server.secret_key + "\n")
    settings = {
        **FAST_SETTINGS,
        "DATABASE_URL": base.rsplit("/", 1)[0] + f"/{name}" + (f"?{query}" if query else ""),
        "REDIS_URL": redis_url,
        "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
        "AWS_ACCESS_KEY_ID": s3_server.access_key,
        "AWS_SECRET_ACCESS_KEY_FILE": str(password_file),
        "BATCHSVC_BUCKET": "t" + secrets.token_hex(8),
        "BATCHSVC_MODEL": tiny_model,
        "BATCHSVC_PORT": str(port),
    }
    yield f"http://127.0.0.1:{port}", settings
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
    admin.dispose()


def test_every_process_by_one_command(
    deployment: Deployment,
    cli: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model: str,
) -> None:
    url, settings = deployment
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    migrated = cli("migrate")
    assert migrated.code == 0, migrated.err
    key = cli("keys", "create", "first", "--from-env").out.strip()
    added = cli("models", "add", tiny_model, "--as", "tiny", "--from-env")
    assert added.code == 0, added.err
    with ExitStack() as processes:
        for role in ("api", "control", "engine"):
            processes.enter_context(_Serving(role, tmp_path))
        wait_for(lambda: _answers(f"{url}/readyz"), "the API ready")
        server = ("--url", url, "--api-key", key)
        wait_for(lambda: cli("models", "list", "--json", *server).json["data"][0]["workers"] == 1, "the engine worker")
        source = write_lines(tmp_path / "in.jsonl", [line(i, "tiny") for i in range(6)])
        ran = cli("run", source, "-o", tmp_path / "out.jsonl", *server)
        assert ran.code == 0, ran.err
        rows = read_lines(tmp_path / "out.jsonl")
        assert [row["custom_id"] for row in rows] == [f"r{i}" for i in range(6)]
        assert all(row["response"]["body"]["usage"]["completion_tokens"] > 0 for row in rows)
        shown = httpx.get(f"{url}/metrics", trust_env=False)
        assert shown.status_code == 200
        assert _answers(f"{url}/livez")
    assert cli("list", *server).code == 6


@pytest.mark.parametrize("command", ["migrate", "keys list --from-env"])
def test_a_missing_setting_is_one_sentence(command: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    refused = cli(*command.split())
    assert refused.code == 1
    assert refused.err.startswith("batchsvc: DATABASE_URL is not set: give it, such as postgresql://")
    assert " REDIS_URL is not set: " in refused.err
    assert refused.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "url", "says"),
    [
        ("keys list --from-env", "sqlite:////nowhere/x.sqlite3", "The database doesn't answer, or isn't migrated"),
        ("keys list --from-env", "sqlite:///{fresh}", "no such table"),
        ("keys list --from-env", "postgresql://127.0.0.1:9/x", "The database doesn't answer, or isn't migrated"),
        ("migrate", "postgresql://127.0.0.1:9/x", "The database doesn't answer"),
        ("migrate", "mysql://db/x", "DATABASE_URL can't be used"),
    ],
)
def test_a_database_that_cannot_be_used_is_one_sentence(
    command: str, url: str, says: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATABASE_URL", url.format(fresh=tmp_path / "fresh.sqlite3"))
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:9/0")
    refused = cli(*command.split())
    assert refused.code == 1
    assert says in refused.err
    assert refused.err.count("\n") == 1


def test_a_migration_waits_for_its_database(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{folder / 'x.sqlite3'}")
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:9/0")
    refused = cli("migrate", "--wait", "0.1")
    assert refused.code == 1
    assert refused.err.splitlines()[-1].startswith("batchsvc: The database doesn't answer")
    timer = threading.Timer(0.5, folder.mkdir)
    timer.start()
    migrated = cli("migrate", "--wait", "60")
    timer.join()
    assert migrated.code == 0, migrated.err
    assert "Waiting for 60 s." in migrated.err
    assert "The database is at revision" in migrated.out


@pytest.mark.parametrize("command", ["serve api", "serve control", "serve engine", "migrate", "keys list --from-env"])
def test_a_wrong_setting_stops_each_process_with_one_sentence(command: str, tmp_path: Path) -> None:
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    wrong = {"DATABASE_URL": "sqlite:///x", "REDIS_URL_FILE": "/nowhere/redis_url", "BATCHSVC_LEASE_S": "soon"}
    refused = subprocess.run(
        [*BATCHSVC, *command.split()], env=env | wrong, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.removeprefix("batchsvc: ") == (
        "REDIS_URL_FILE can't be read ('/nowhere/redis_url': No such file or directory). BATCHSVC_LEASE_S can't be "
        "'soon': it must be a number (how long a unit stays with a silent worker; unset, it is 30).\n"
    )
    assert not (tmp_path / "x").exists()


def test_a_wrong_setting_stops_the_embedded_stack_before_anything_has_started(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHSVC_FLUSH_S", "-1")
    refused = cli("up", "--data-dir", tmp_path / "d")
    assert refused.code == 1
    assert refused.err.count("BATCHSVC_FLUSH_S can't be '-1': it must be more than 0 (") == 1
    assert "Starting" not in refused.err
    assert not list((tmp_path / "d" / "logs").glob("valkey*"))


class _Serving:
    """A process of the deployment: started, and ended in order at the end of the block."""

    def __init__(self, role: str, folder: Path) -> None:
        self._log = folder / f"{role}.log"
        self._role = role

    def __enter__(self) -> None:
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen([*BATCHSVC, "serve", self._role], stdout=sink, stderr=sink)

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        code = self._process.wait(LIVENESS_S)
        assert code in (0, -signal.SIGTERM), self._log.read_text()[-3000:]  # uvicorn ends by the signal, in order


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
