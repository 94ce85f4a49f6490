"""A Valkey of a test's own, which it may kill, start again empty, or fill up."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

import redis

from batchsvc.stack import services

_READY_S = 60.0


class OwnValkey:
    """One server on one port; `start` begins with no data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "own-valkey"
        self._password = secrets.token_hex(16)
        self._port = services.choose_ports(("valkey",))["valkey"]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def start(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        command = services.valkey(self._directory, port=self._port, password=self._password)
        quiet = subprocess.DEVNULL
        env = {**os.environ, **command.env}
        self._process = subprocess.Popen(command.argv, env=env, cwd=command.cwd, stdout=quiet, stderr=quiet)
        deadline = time.monotonic() + _READY_S
        while not services.valkey_is_ready(self._port, self._password):
            assert time.monotonic() < deadline, "Valkey isn't ready"
            time.sleep(0.02)

    def kill(self) -> None:
        """-9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def fill(self) -> None:
        """From now on every write is refused, because memory is full."""
        with redis.Redis.from_url(self.url) as client:
            client.config_set("maxmemory", 1)
