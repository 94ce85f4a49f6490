"""A million short lines through a deployment on PostgreSQL with two engine workers: complete, in order, under 1 GB.

It prints lines a second, the time of each phase and the peak memory of each process, and asserts no speed.
`MILLION_LINES` makes it smaller.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from batchsvc.stack.services import choose_ports
from tests.e2e.conftest import BATCHSVC, LIVENESS_S, CommandLine, wait_for
from tests.servers import S3Server, fresh_database

LINES = int(os.environ.get("MILLION_LINES", "1000000"))
MOST_RSS_BYTES = 10**9
ROLES = ("api", "control", "engine-1", "engine-2")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_lines(
    postgres_url: str,
    redis_url: str,
    s3_server: S3Server,
    tiny_model: str,
    cli: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("wb") as file:
        file.writelines(_line(number) for number in range(LINES))
    port = choose_ports(("api",))["api"]
    url = f"http://127.0.0.1:{port}"
    with fresh_database(postgres_url) as database_url, ExitStack() as stack:
        settings = {
            "DATABASE_URL": database_url,
            "REDIS_URL": redis_url,
            "AWS_ENDPOINT_URL_S3": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": s3_server.access_key,
            "AWS_SECRET_ACCESS_KEY": s3_server.secret_key,
            "BATCHSVC_BUCKET": "t" + secrets.token_hex(8),
            "BATCHSVC_MODEL": tiny_model,
            "BATCHSVC_ENGINE": "fake",
            "BATCHSVC_PORT": str(port),
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        assert cli("migrate").code == 0
        key = cli("keys", "create", "first", "--from-env").out.strip()
        added = cli("models", "add", tiny_model, "--as", "tiny", "--from-env")
        assert added.code == 0, added.err
        pids = {role: stack.enter_context(_serving(role, tmp_path)) for role in ROLES}
        client = stack.enter_context(
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=600)
        )
        wait_for(lambda: _answers(client), "the API ready")
        peaks = stack.enter_context(_watching(pids))
        began = time.monotonic()
        batch, moments = _run(client, source)
        took_s = time.monotonic() - began
        cpu_s = {role: round(sum(psutil.Process(pid).cpu_times()[:2]), 1) for role, pid in pids.items()}
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        _check_order(client, batch["output_file_id"])
        print(f"\n{LINES} lines in {took_s:.1f} s: {LINES / took_s:.0f} lines/s from the first byte sent to the end")
        print({name: f"{moment - began:.1f} s" for name, moment in moments.items()})
        print({name: f"{peak / 1e6:.0f} MB" for name, peak in peaks.items()}, "CPU", cpu_s)
        assert {name for name, peak in peaks.items() if peak > MOST_RSS_BYTES} == set()


def _run(client: httpx.Client, source: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The ended batch, and when each status was first seen."""
    with source.open("rb") as file:
        uploaded = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", file)})
    assert uploaded.status_code == 200, uploaded.text
    moments = {"uploaded": time.monotonic()}
    body = {
        "input_file_id": uploaded.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    batch: dict[str, Any] = client.post("/v1/batches", json=body).json()
    while batch["status"] in ("validating", "in_progress", "finalizing"):
        moments.setdefault(batch["status"], time.monotonic())
        time.sleep(0.5)
        batch = client.get(f"/v1/batches/{batch['id']}").json()
    return batch, moments | {"ended": time.monotonic()}


def _check_order(client: httpx.Client, file_id: str) -> None:
    number = 0
    with client.stream("GET", f"/v1/files/{file_id}/content") as answer:
        for number, row in enumerate(answer.iter_lines(), start=1):
            found = json.loads(row)
            assert (found["custom_id"], found["line"]) == (f"r{number - 1}", number)
    assert number == LINES


@contextmanager
def _serving(role: str, directory: Path) -> Iterator[int]:
    """A process of the deployment; its pid."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    with (directory / f"{role}.log").open("wb") as log:
        process = subprocess.Popen(
            [*BATCHSVC, "serve", role.partition("-")[0]], env=kept, cwd=directory, stdout=log, stderr=log
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(LIVENESS_S)


@contextmanager
def _watching(pids: dict[str, int]) -> Iterator[dict[str, int]]:
    """Peak resident memory by process, as it is seen five times a second."""
    peaks = dict.fromkeys(pids, 0)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            for name, pid in pids.items():
                peaks[name] = max(peaks[name], psutil.Process(pid).memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        ended.set()
        thread.join()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def _line(number: int) -> bytes:
    messages = [{"role": "user", "content": f"Where is parcel {number}?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8}
    row = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(row).encode() + b"\n"
