"""Commands with no stack running: they start all they need, Ctrl-C stops it cleanly, and a repeated run goes on."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from batchsvc.stack.datadir import DataDir
from batchsvc.stack.options import DEFAULT_MODEL
from tests.e2e.conftest import (
    BATCHSVC,
    FAST_SETTINGS,
    LIVENESS_S,
    CommandLine,
    line,
    processes_of,
    read_lines,
    write_lines,
)
from tests.tiny import make_tiny_model


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_leaves_nothing_behind(
    stack_env: dict[str, str], tiny_model: str, foreign_folder: Path, tmp_path: Path
) -> None:
    rows = [line(i, tiny_model, max_tokens=50, ignore_eos=True) for i in range(40)]
    source, directory = write_lines(tmp_path / "in.jsonl", rows), DataDir(tmp_path / "d")
    env = {**stack_env, "BATCHSVC_FAKE_TOKENS_PER_S": "40", "BATCHSVC_FAKE_WITNESS": str(tmp_path / "witness")}
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


def test_ctrl_c_during_a_start_ends_with_130_and_leaves_nothing(stack_env: dict[str, str], tmp_path: Path) -> None:
    directory = DataDir(tmp_path / "d")
    command = [*BATCHSVC, "up", "--port", "0", "--data-dir", str(directory.root)]
    up = subprocess.Popen(command, env=stack_env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    watchdog = threading.Timer(LIVENESS_S, up.kill)
    watchdog.start()
    said = up.stderr.readline()
    up.send_signal(signal.SIGINT)
    said += up.stderr.read()
    up.stderr.close()
    assert up.wait(LIVENESS_S) == 130, said
    watchdog.cancel()
    assert "Traceback" not in said
    assert directory.holder() is None and not processes_of(directory)


@pytest.mark.slow
def test_watch_starts_the_engine_that_its_batch_needs(
    cli: CommandLine, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in FAST_SETTINGS.items():
        monkeypatch.setenv(name, value)
    flags = ("--data-dir", tmp_path / "d")
    named, shipped = line(0, "mine"), line(0, DEFAULT_MODEL)
    overridden = cli("submit", write_lines(tmp_path / "a.jsonl", [shipped]), "--model", DEFAULT_MODEL, *flags)
    assert overridden.code == 0, "a fresh data directory knows the model that we ship: " + overridden.err
    assert cli("models", "add", tiny_model, "--as", "mine", *flags).code == 0
    unplanned = cli("submit", write_lines(tmp_path / "b.jsonl", [named]), *flags)
    assert unplanned.code == 0, unplanned.err
    batch_id = unplanned.out.strip()

    first = cli("watch", batch_id, *flags)  # nobody has read the file yet, so the default model it is
    assert first.code == 1
    assert f"go on with `batchsvc watch {batch_id}" in first.err
    again = cli("watch", batch_id, *flags)
    assert again.code == 0, again.err
    assert cli("show", overridden.out.strip(), "--json", *flags).json["status"] in ("in_progress", "completed")


@pytest.mark.slow
def test_a_stack_of_two_models_runs_a_file_that_names_both(
    stack_env: dict[str, str], tiny_model: str, tmp_path: Path
) -> None:
    other = str(make_tiny_model(tmp_path / "other", seed=5, context_tokens=2048))
    directory = DataDir(tmp_path / "d")
    flags = ["--data-dir", str(directory.root)]

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BATCHSVC, *arguments, *flags], env=stack_env, capture_output=True, text=True, timeout=LIVENESS_S
        )

    up = command("up", "--detach", "--port", "0", "--model", tiny_model, "--model", other)
    try:
        assert up.returncode == 0 and f"{tiny_model}, {other}" in up.stdout, up.stderr
        source = write_lines(tmp_path / "in.jsonl", [line(at, (tiny_model, other)[at % 2]) for at in range(6)])
        run = command("run", str(source), "--models-by-line", "-o", str(tmp_path / "out.jsonl"))
        assert run.returncode == 0, run.stderr
        named = [row["response"]["body"]["model"] for row in read_lines(tmp_path / "out.jsonl")]
        assert named == [tiny_model, other] * 3
        names = [process["name"] for process in json.loads(command("status", "--json").stdout)["processes"]]
        assert names[-2:] == ["engine", "engine-2"]
    finally:
        assert command("down").returncode == 0
    lone = command("run", str(source), "--models-by-line", "-o", str(tmp_path / "2.jsonl"), "--name", "again")
    assert lone.returncode == 1 and f"batchsvc up --model {tiny_model} --model {other}" in lone.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("another vocabulary", "has another vocabulary than"),
        ("missing", "There is no model"),
        ("no model", "is no model directory: config.json is missing"),
    ],
)
def test_a_draft_that_cannot_be_used_is_told_before_there_is_a_batch(
    stack_env: dict[str, str], tiny_model: str, tmp_path: Path, kind: str, says: str
) -> None:
    """By the real engine, which alone reads a draft."""
    draft, directory = tmp_path / "draft", DataDir(tmp_path / "d")
    if kind == "another vocabulary":
        make_tiny_model(draft, layers=1, vocab_size=320)
    elif kind == "no model":
        draft.mkdir()
    source = write_lines(tmp_path / "in.jsonl", [line(0, tiny_model)])
    flags = ["--model", tiny_model, "--data-dir", str(directory.root)]
    env = {name: value for name, value in stack_env.items() if name != "BATCHSVC_ENGINE"}
    arguments = [*BATCHSVC, "run", str(source), "-o", str(tmp_path / "out.jsonl"), "--draft", str(draft), *flags]
    refused = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=LIVENESS_S)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr, refused.stderr
    (said,) = [text for text in refused.stderr.splitlines() if text.startswith("batchsvc: ")]
    assert says in said and str(draft) in said
    assert not (tmp_path / "out.jsonl").exists() and not processes_of(directory)
    with closing(sqlite3.connect(directory.root / "db.sqlite3")) as database:
        assert database.execute("SELECT count(*) FROM batches").fetchone() == (0,)
