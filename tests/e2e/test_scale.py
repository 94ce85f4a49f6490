"""50,000 lines, 200 MB, through the whole service: every process but the engine worker stays under 1 GB."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import read_state
from tests.e2e.conftest import BATCHSVC, FAST_SETTINGS

LINES, LINE_BYTES = 50_000, 4_000
MOST_RSS_BYTES = 10**9
WORDS = ("the", "parcel", "was", "late", "and", "my", "order", "number", "is", "on", "a", "box", "that", "came")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_50_000_lines_stream(tmp_path: Path) -> None:
    source, directory = tmp_path / "in.jsonl", DataDir(tmp_path / "d")
    with source.open("wb") as file:
        for number in range(LINES):
            file.write(_line(number))
    assert source.stat().st_size > 190_000_000
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "BATCHSVC_"))}
    env = {**kept, **FAST_SETTINGS, "BATCHSVC_FAKE_TOKENS_PER_S": "0"}
    flags = ["--data-dir", str(directory.root)]
    subprocess.run([*BATCHSVC, "up", "--detach", *flags], env=env, check=True, timeout=600)
    try:
        arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--json", *flags]
        run = subprocess.Popen([*BATCHSVC, *arguments], env=env, stdout=subprocess.PIPE, text=True)
        peaks: dict[str, int] = {}
        state = read_state(directory)
        assert state is not None
        pids = {process.name: process.pid for process in state.processes} | {"supervisor": state.pid, "run": run.pid}
        while run.poll() is None:
            for name, pid in pids.items():
                peaks[name] = max(peaks.get(name, 0), _rss_bytes(pid))
            try:
                run.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        batch = json.loads(run.communicate()[0])
        assert run.returncode == 0
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        with (tmp_path / "out.jsonl").open("rb") as results:
            for number, row in enumerate(results):
                assert json.loads(row)["custom_id"] == f"r{number}"
        print({name: f"{peak / 1e6:.0f} MB" for name, peak in peaks.items()})
        assert {name for name, peak in peaks.items() if peak > MOST_RSS_BYTES} <= {"engine"}
    finally:
        subprocess.run([*BATCHSVC, "down", *flags], env=env, check=True, timeout=600)


def _line(number: int) -> bytes:
    words, size = [f"Ticket {number}:"], 0
    while size < LINE_BYTES - 200:
        word = WORDS[(number * 31 + len(words) * 7) % len(WORDS)]
        words.append(word)
        size += len(word) + 1
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": " ".join(words)}], "max_tokens": 16}
    row = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(row).encode() + b"\n"


def _rss_bytes(pid: int | None) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
