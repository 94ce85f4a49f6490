"""`run` with no stack running: it starts all it needs, Ctrl-C stops it cleanly, and a repeated run goes on."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import pytest

from batchsvc.stack.datadir import DataDir
from tests.e2e.conftest import BATCHSVC, LIVENESS_S, line, processes_of, read_lines, write_lines


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_leaves_nothing_behind(
    stack_env: dict[str, str], tiny_model: str, foreign_folder: Path, tmp_path: Path
) -> None:
    rows = [line(i, tiny_model, max_tokens=50, ignore_eos=True) for i in range(40)]
    source, directory = write_lines(tmp_path / "in.jsonl", rows), DataDir(tmp_path / "d")
    env = {**stack_env, "BATCHSVC_FAKE_TOKENS_PER_S": "200", "BATCHSVC_FAKE_WITNESS": str(tmp_path / "witness")}
    arguments = [*BATCHSVC, "run", str(source), "-o", str(tmp_path / "out.jsonl"), "--model", tiny_model]
    arguments += ["--data-dir", str(directory.root)]

    first = subprocess.Popen(arguments, env=env, cwd=foreign_folder, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    watchdog = threading.Timer(LIVENESS_S, first.kill)
    watchdog.start()
    said = ""
    for text in first.stderr:
        said += text
        if text.startswith("in_progress") and " 0 of " not in text:
            first.send_signal(signal.SIGINT)
            break
    said += first.stderr.read()
    first.stderr.close()
    assert first.wait(LIVENESS_S) == 130, said
    watchdog.cancel()
    assert "Repeat the command to go on with it" in said
    assert "Traceback" not in said
    assert directory.holder() is None
    assert not processes_of(directory)

    again = subprocess.run(
        arguments, env=env, cwd=foreign_folder, capture_output=True, text=True, timeout=LIVENESS_S, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "Going on with batch_" in again.stderr
    assert [row["custom_id"] for row in read_lines(tmp_path / "out.jsonl")] == [row["custom_id"] for row in rows]
    starts = [row["id"] for row in read_lines(tmp_path / "witness") if row["event"] == "start"]
    lines = {(unit, number) for unit, _epoch, number in (started.split(":") for started in starts)}
    assert len(lines) == len(rows)
    assert len(starts) < 2 * len(rows), "what was finished before the interruption isn't run again"
