"""Restoring a backup with the command line alone, as README tells: a stack works, is copied, and goes on elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from batchsvc.stack.datadir import DataDir
from tests.e2e.conftest import BATCHSVC, LIVENESS_S, CommandLine, Result, Stack, line, read_lines, wait_for, write_lines

Run = Callable[..., Result]
pytestmark = pytest.mark.slow  # in CI: row 76, and a data directory whose store runs alone
LINES = 800


def test_a_batch_in_flight_goes_on_in_a_restored_stack(
    stack: Stack, stack_cli: Run, cli: CommandLine, stack_env: dict[str, str], tmp_path: Path
) -> None:
    rows = [line(number, stack.model, max_tokens=40, ignore_eos=True) for number in range(LINES)]
    batch = stack_cli("submit", write_lines(tmp_path / "in.jsonl", rows), "--json").json["id"]

    def done() -> int:
        return int(stack_cli("show", batch, "--json").json["request_counts"]["completed"])

    wait_for(lambda: done() > 5, "some lines are done")
    made = stack_cli("backup", tmp_path / "backups", "--include-secrets", "--json")
    assert made.code == 0, made.err
    assert stack_cli("cancel", batch).code == 0, "what happens here afterwards is no matter there"
    refused = stack_cli("restore", tmp_path / "backups")
    assert refused.code == 1
    assert f"batchsvc down --data-dir {stack.directory.root}" in refused.err

    there = DataDir.at(tmp_path / "there")
    flags = ["--data-dir", str(there.root)]
    shutil.copytree(tmp_path / "backups", tmp_path / "half")
    next((tmp_path / "half" / "objects").glob("??/*")).unlink()
    half = cli("restore", tmp_path / "half", *flags)
    assert half.code == 1
    assert "half-copied: 1 of" in half.err
    assert not there.database.exists()
    restored = cli("restore", tmp_path / "backups", *flags)
    assert restored.code == 0, restored.err
    assert f"unfinished batches go on with `batchsvc up --data-dir {there.root}`" in restored.out
    again = cli("restore", tmp_path / "backups", *flags)
    assert again.code == 1
    assert "isn't empty" in again.err

    up = [*BATCHSVC, "up", "--detach", "--port", "0", "--model", stack.model, *flags]
    started = subprocess.run(up, env=stack_env, cwd=tmp_path, capture_output=True, text=True, timeout=LIVENESS_S)
    assert started.returncode == 0, started.stderr
    try:
        assert there.api_key.read_text() == stack.directory.api_key.read_text(), "the same key opens both"
        watched = cli("watch", batch, *flags)
        assert watched.code == 0, watched.err
        results = cli("results", batch, "-o", tmp_path / "out.jsonl", *flags)
        assert results.code == 0, results.err
        got = read_lines(tmp_path / "out.jsonl")
        assert [row["custom_id"] for row in got] == [row["custom_id"] for row in rows], "each line once, in order"
        audit = cli("reconcile", "--batch", batch, *flags)
        assert audit.code == 0, audit.out
    finally:
        assert cli("down", *flags).code == 0
    stopped = cli("backup", tmp_path / "backups", *flags, "--json")  # a stack that doesn't run, beside the other's
    assert stopped.code == 0, stopped.err
    assert stopped.json["num_missing"] == 0
    assert stopped.json["num_copied"] < stopped.json["num_objects"], "what both have is there once"
