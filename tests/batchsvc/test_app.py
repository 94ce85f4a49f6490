"""The API process as a program: light imports, one sentence when it can't start, a clean stop."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from batchsvc.settings import Settings


def test_importing_loads_no_torch(tmp_path: Path) -> None:
    script = "import sys, batchsvc.app; print([name for name in ('torch', 'triton', 'workers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def environment(settings: Settings, **changes: str) -> dict[str, str]:
    return {
        "PATH": "",
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "AWS_ENDPOINT_URL_S3": str(settings.s3_endpoint),
        "AWS_ACCESS_KEY_ID": str(settings.s3_access_key),
        "AWS_SECRET_ACCESS_KEY": str(settings.s3_secret_key),
        "BATCHSVC_BUCKET": settings.bucket,
        **changes,
    }


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_it_migrates_serves_and_stops(settings: Settings, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "batchsvc.app"],
        env=environment(settings, BATCHSVC_PORT=str(port)),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=10)
                break
            except httpx.HTTPError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        assert answer.json()["status"] == "ready"
        assert "server" not in answer.headers
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM), said
    assert "Traceback" not in said


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"BATCHSVC_PORT": "many"}, "BATCHSVC_PORT"),
        ({"DATABASE_URL": "sqlite:////nowhere/at/all.sqlite3"}, "The database"),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "The object store doesn't answer."),
    ],
)
def test_what_it_cannot_work_with_is_one_sentence(
    settings: Settings, tmp_path: Path, change: dict[str, str], says: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "batchsvc.app"],
        env=environment(settings, **change),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert says in done.stderr.splitlines()[-1]
