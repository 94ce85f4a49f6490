"""The embedded stack: one owner a directory, no port twice, nothing readable without a key, back after a crash."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from sqlalchemy import text

from batchsvc.db.session import Database
from batchsvc.stack.datadir import DataDir
from tests.e2e.conftest import (
    BATCHSVC,
    LIVENESS_S,
    CommandLine,
    Result,
    Stack,
    line,
    processes_of,
    wait_for,
    write_lines,
)

Run = Callable[..., Result]

LIGHT_STACK = """
import sys, time
from pathlib import Path
from batchsvc.stack.launch import launch
from batchsvc.stack.options import READING, StackOptions
launch(StackOptions(root=Path(sys.argv[1]), port=0, purpose="up", roles=READING), lambda text: None)
"""


def test_status_names_all_processes(stack: Stack, stack_cli: Run) -> None:
    status = stack_cli("status", "--json")
    assert status.code == 0, status.out
    assert status.json["data_dir"] == str(stack.directory.root)
    assert {p["name"] for p in status.json["processes"]} == {"valkey", "seaweedfs", "api", "control", "engine"}
    assert {p["state"] for p in status.json["processes"]} == {"ready"}
    assert all(psutil.pid_exists(p["pid"]) for p in status.json["processes"])
    signals = {p["name"]: p["signals"] for p in status.json["processes"] if p["signals"]}
    assert set(signals) == {"api", "control", "engine"}
    for name, url in signals.items():
        ready = httpx.get(f"{url}/readyz", trust_env=False, timeout=30).json()
        assert ready["status"] == "ready" and (name == "api" or ready["parts"][name] == "ok")
        assert "batchsvc_ready 1.0" in httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
    base = status.json["url"].removesuffix("/v1")
    assert httpx.get(base + "/readyz", trust_env=False).json()["status"] == "ready"


def test_a_second_up_is_one_sentence(stack: Stack, stack_cli: Run) -> None:
    pid = stack.directory.holder()
    refused = stack_cli("up", "--detach")
    assert refused.code == 1
    assert refused.err.count("\n") == 1
    assert f"pid {pid}" in refused.err


def test_a_taken_port_is_one_sentence(cli: CommandLine, tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        refused = cli("up", "--detach", "--port", port, "--data-dir", tmp_path / "d")
    assert refused.code == 1
    assert refused.err == f"batchsvc: Port {port} on 127.0.0.1 is taken: choose another one with --port.\n"


@pytest.mark.parametrize("command", ["up", "list", "keys list"])
def test_a_directory_that_cannot_be_made_is_one_sentence(cli: CommandLine, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").touch()
    refused = cli(*command.split(), "--data-dir", tmp_path / "file" / "d")
    assert refused.code == 1
    assert refused.err.count("\n") == 1
    assert "--data-dir" in refused.err


def test_no_listener_serves_an_object_without_a_key(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(7, stack.model)])
    assert stack_cli("submit", source).code == 0
    with Database(stack.directory.database_url).reading() as session:
        key = session.execute(text("SELECT s3_key FROM files ORDER BY created_ms DESC")).scalars().first()
    weed = next(p for p in stack_cli("status", "--json").json["processes"] if p["name"] == "seaweedfs")
    listeners = [c.laddr for c in psutil.Process(weed["pid"]).net_connections() if c.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listeners} == {"127.0.0.1"}
    asked = 0
    for address in listeners:
        for path in ("/", f"/batchsvc/{key}", f"/buckets/batchsvc/{key}", "/buckets/batchsvc/", "/1,01637037d6"):
            try:
                answer = httpx.get(f"http://127.0.0.1:{address.port}{path}", trust_env=False, timeout=5)
            except httpx.HTTPError:
                continue  # a gRPC listener
            asked += 1
            assert b"Say the number" not in answer.content
            assert "batchsvc" not in answer.text or answer.status_code in (401, 403, 404), answer.text
    assert asked > 10


def test_a_crashed_api_comes_back_while_a_command_waits(stack: Stack, stack_cli: Run) -> None:
    def pid() -> int | None:
        return next(p["pid"] for p in stack_cli("status", "--json").json["processes"] if p["name"] == "api")

    before = pid()
    assert before is not None
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: pid() != before, "another API process")
    assert stack_cli("list").code == 0
    wait_for(lambda: stack_cli("status", "--json").code == 0, "all processes ready")


def test_logs_show_each_process_and_follow_what_comes(stack: Stack, stack_cli: Run) -> None:
    shown = stack_cli("logs", "api", "-n", "5")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("api | ")
    assert {row.split(" | ")[0] for row in shown.out.splitlines()} == {"api"}
    missing = stack_cli("logs", "nobody")
    assert (missing.code, missing.err.count("\n")) == (1, 1)
    following = [*BATCHSVC, "logs", "-f", "-n", "0", "api", *stack.flags]
    with subprocess.Popen(following, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(LIVENESS_S, process.kill)
        watchdog.start()
        time.sleep(1)  # it has to look once before; what comes earlier than that would need no -f
        while process.poll() is None:
            assert stack_cli("list").code == 0
            is_heard = select.select([process.stdout], [], [], 1)[0]  # else it hadn't looked before: list again
            if is_heard and "/v1/batches" in process.stdout.readline():
                process.send_signal(signal.SIGINT)
                break
        _, err = process.communicate(timeout=60)
        watchdog.cancel()
    assert (process.returncode, err) == (130, "")


def test_doctor_finds_a_running_stack_well(stack: Stack, stack_cli: Run) -> None:
    looked = stack_cli("doctor", "--json")
    assert looked.code == 0, looked.out
    checks = {check["name"]: check for check in looked.json["checks"]}
    assert {"data directory", "valkey", "seaweedfs", "torch", "model", "stack"} <= set(checks)
    assert "running at http://" in checks["stack"]["says"]
    asked = {"database", "redis", "store", "disk", "clocks", "models", "workers", "claims", "batches", "reaper"}
    assert {f"service: {name}" for name in (*asked, "outbox", "ledger")} <= set(checks)


def test_doctor_names_what_is_wrong(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    looked = cli("doctor", "--data-dir", tmp_path / "file" / "d")
    assert looked.code == 1
    assert [row.split()[0] for row in looked.out.splitlines() if "PROBLEM" in row] == ["data"]
    assert "--data-dir" in looked.out


def test_keys_are_made_and_revoked(stack: Stack, stack_cli: Run, cli: CommandLine) -> None:
    url = stack_cli("status", "--json").json["url"]
    made = stack_cli("keys", "create", "cron", "--json").json
    server = ("--url", url, "--api-key")
    assert cli("list", *server, made["key"], "--json").code == 0
    listed = stack_cli("keys", "list", "--json")
    assert made["id"] in {row["id"] for row in listed.json["data"]}
    assert made["key"] not in listed.out
    admin = stack.directory.admin_key.read_text().strip()
    assert cli("keys", "revoke", made["id"], *server, made["key"]).code == 1
    assert cli("keys", "revoke", made["id"], *server, admin).code == 0
    assert cli("list", *server, made["key"]).code == 1


def test_a_stack_goes_on_with_its_own_key_rotated(stack: Stack, stack_cli: Run) -> None:
    old = stack.directory.api_key.read_text().strip()
    made = stack_cli("keys", "rotate", old[3:11], "--overlap", "1h", "--json").json
    assert stack.directory.api_key.read_text().strip() == made["key"] != old
    assert stack_cli("list", "--json").code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_second_stack_runs_beside_the_first_and_survives_kill_9(
    stack: Stack, stack_env: dict[str, str], foreign_folder: Path, tmp_path: Path, cli: CommandLine
) -> None:
    """Killed, it leaves no process; then `list` starts what it needs on the same ports, stops it, and leaves none."""
    second = DataDir(tmp_path / "second")
    started = subprocess.run(
        [sys.executable, "-P", "-c", LIGHT_STACK, str(second.root)],
        env=stack_env,
        cwd=foreign_folder,
        capture_output=True,
        text=True,
        timeout=LIVENESS_S,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    pid, ports = second.holder(), second.read_json("ports.json")
    assert pid is not None
    assert not set(ports.values()) & set(stack.directory.read_json("ports.json").values())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while processes_of(second):
        assert time.monotonic() < deadline, "children outlived their supervisor"
        time.sleep(0.05)
    flags = ("--data-dir", second.root)
    assert cli("status", *flags).code == 1
    listed = cli("list", "--json", *flags)
    assert listed.code == 0, listed.err
    assert listed.json["object"] == "list"
    assert second.read_json("ports.json") == ports
    assert second.holder() is None
    assert not processes_of(second)
    assert second.api_key.stat().st_mode & 0o777 == 0o600


def test_config_show_tells_what_the_running_stack_was_started_with(stack: Stack, cli: CommandLine) -> None:
    shown = cli("config", "show", "--json", *stack.flags)
    assert shown.code == 0, shown.err
    told = {row["name"]: (row["value"], row["source"], row["place"]) for row in shown.json["settings"]}
    assert told["BATCHSVC_MODEL"] == (stack.model, "flag", "--model")
    assert told["DATABASE_URL"][1] == "stack"
    secrets = [path.read_text().strip() for path in (stack.directory.root / "secrets").iterdir()]
    assert secrets
    assert not any(secret in shown.out for secret in secrets)
