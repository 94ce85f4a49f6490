"""README's one command, as a newcomer runs it: the default model, our engine, a stack of its own, real requests."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from pathlib import Path

from batchsvc.stack.datadir import DataDir
from tests.e2e.conftest import BATCHSVC, processes_of, read_lines

TICKETS = Path(__file__).parent.parent / "data" / "tickets.jsonl"
COUNT = 24  # of its 64 lines: all of them say nothing more
LIVENESS_S = 280.0  # a busy machine with two cores needs minutes, an idle one seconds


def test_the_sample_job_goes_through_the_whole_service(tmp_path: Path) -> None:
    directory = DataDir(tmp_path / "data")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "BATCHSVC_"))}
    source = tmp_path / "tickets.jsonl"
    source.write_bytes(b"".join(TICKETS.read_bytes().splitlines(keepends=True)[:COUNT]))
    command = [*BATCHSVC, "run", str(source), "--data-dir", str(directory.root), "--json"]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIVENESS_S, check=False
    )
    assert done.returncode == 0, done.stderr
    for phase in ("Starting Valkey and SeaweedFS", "Loading smollm2-135m", "in_progress", "completed"):
        assert phase in done.stderr, f"{phase!r} isn't told"
    assert "Traceback" not in done.stderr
    assert not processes_of(directory), "what the command started is stopped"
    assert not list(tmp_path.glob("*.partial"))

    batch = json.loads(done.stdout)
    wants, rows = read_lines(source), read_lines(tmp_path / "tickets.results.jsonl")
    assert [row["custom_id"] for row in rows] == [want["custom_id"] for want in wants]
    bodies = [row["response"]["body"] for row in rows]
    texts = [body["choices"][0]["message"]["content"] for body in bodies]
    assert all(row["response"]["status_code"] == 200 for row in rows)
    assert all(texts)
    assert len(set(texts)) > len(texts) / 2
    assert all(body["usage"]["completion_tokens"] >= 30 for body in bodies)

    usages = [body["usage"] for body in bodies]
    total = batch["usage"]
    assert batch["request_counts"] == {"total": COUNT, "completed": COUNT, "failed": 0}
    assert sum(usage["cost_nanos"] for usage in usages) == total["cost_nanos"] > 0
    assert sum(usage["prompt_tokens"] for usage in usages) == total["input_tokens"]
    assert sum(usage["completion_tokens"] for usage in usages) == total["output_tokens"]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached == total["input_tokens_details"]["cached_tokens"]
    assert cached > 0.8 * total["input_tokens"], "the shared system prompt is computed once"
    assert batch["weight_format"] in ("int8", "bf16")
    assert batch["kv_format"] in ("int8", "bf16")
    with sqlite3.connect(directory.database) as ledger:
        (earned,) = ledger.execute("SELECT SUM(amount_nanos) FROM ledger_entries WHERE account = 'revenue'").fetchone()
        (balance,) = ledger.execute("SELECT SUM(amount_nanos) FROM ledger_entries").fetchone()
    assert abs(earned) == total["cost_nanos"]
    assert balance == 0
