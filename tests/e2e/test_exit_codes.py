"""Every row of the table of exit codes, by a real command; and nothing but one document on stdout with --json."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BATCHSVC, CommandLine, Result, Stack, line, wait_for, write_lines

Run = Callable[..., Result]


def test_0_every_line_answered(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(i, stack.model) for i in range(3)])
    ran = stack_cli("run", source, "-o", tmp_path / "out.jsonl", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["object"] == "batch"
    assert ran.json["status"] == "completed"
    listed = stack_cli("list", "--limit", "1", "--json")
    assert listed.code == 0
    assert listed.json["object"] == "list"
    assert listed.json["data"][0]["id"] == ran.json["id"]
    shown = stack_cli("show", ran.json["id"], "--json")
    assert shown.json == listed.json["data"][0]
    assert stack_cli("watch", ran.json["id"], "--json").json["status"] == "completed"
    assert stack_cli("results", ran.json["id"]).out.encode() == (tmp_path / "out.jsonl").read_bytes()


def test_1_the_command_failed(stack_cli: Run) -> None:
    missing = stack_cli("show", "batch_nope")
    assert missing.code == 1
    assert missing.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "Name one input"),
        (["run", "nowhere.jsonl"], "There is no file nowhere.jsonl."),
        (["run", "."], "is a directory"),
        (["list", "--url", "http://127.0.0.1:1"], "--api-key is missing"),
        (["list", "--limit", "0"], "--limit"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_2_wrong_usage(cli: CommandLine, arguments: list[str], says: str) -> None:
    refused = cli(*arguments)
    assert refused.code == 2
    assert says in refused.err
    assert refused.out == ""


def test_3_error_lines(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    rows = [line(0, stack.model), line(1, stack.model, temperature=-1), line(2, stack.model)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    ran = stack_cli("run", source, "-o", tmp_path / "out.jsonl", "--json")
    assert ran.code == 3, ran.err
    assert ran.json["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    watch = ("watch", ran.json["id"], "--allow-errors")
    assert [stack_cli(*watch, allowed).code for allowed in ("0", "1", "33%", "34%")] == [3, 0, 3, 0]


def test_4_the_input_was_refused(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    rows = [line(0, stack.model), b"{not json", line(2, stack.model)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    refused = stack_cli("run", source, "-o", tmp_path / "out.jsonl")
    assert refused.code == 4
    assert "line 2: " in refused.err
    assert "--skip-invalid" in refused.err
    assert not (tmp_path / "out.jsonl").exists()
    skipped = stack_cli("run", source, "-o", tmp_path / "out.jsonl", "--skip-invalid", "--allow-errors", "1")
    assert skipped.code == 0, skipped.err
    (tmp_path / "empty.jsonl").touch()
    assert stack_cli("run", tmp_path / "empty.jsonl").code == 4


def test_4_an_unknown_model_shows_the_way_out(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(0, "gpt-4o-mini")])
    refused = stack_cli("run", source, "-o", tmp_path / "out.jsonl")
    assert refused.code == 4
    assert "batchsvc models alias" in refused.err
    override = stack_cli("run", source, "-o", tmp_path / "out.jsonl", "--model", stack.model)
    assert override.code == 0, override.err
    assert "overrides" in override.err
    assert stack_cli("models", "alias", "gpt-4o-mini", stack.model).code == 0
    aliased = stack_cli("run", source, "-o", tmp_path / "out.jsonl")
    assert aliased.code == 0, aliased.err


def test_4_a_refused_call(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", [line(0, stack.model)])
    refused = stack_cli("run", source, "-o", tmp_path / "out.jsonl", "--name", "n" * 200)
    assert refused.code == 4
    assert refused.err.count("\n") == 1


def test_5_cancelled(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    rows = [line(i, stack.model, max_tokens=900, ignore_eos=True) for i in range(20)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    batch_id = stack_cli("submit", source).out.strip()
    early = stack_cli("results", batch_id, "-o", tmp_path / "out.jsonl")
    assert early.code == 1, early.err
    cancelled = stack_cli("cancel", batch_id, "--json")
    assert cancelled.code == 0, cancelled.err
    watched = stack_cli("watch", batch_id, "--json")
    assert watched.code == 5
    assert watched.json["status"] == "cancelled"


def test_6_unreachable(cli: CommandLine) -> None:
    away = cli("list", "--url", "http://127.0.0.1:1", "--api-key", "sk")
    assert away.code == 6
    assert away.err == f"batchsvc: http://127.0.0.1:1/v1 can't be reached: {away.err.split(': ', 2)[2]}"


def test_130_ctrl_c_detaches_and_a_repeated_run_goes_on(stack: Stack, stack_cli: Run, tmp_path: Path) -> None:
    rows = [line(i, stack.model, max_tokens=200, ignore_eos=True) for i in range(20)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    arguments = ["run", str(source), "-o", str(tmp_path / "out.jsonl"), "--name", "nightly", *stack.flags]
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    with subprocess.Popen([*BATCHSVC, *arguments], env=env, stderr=subprocess.PIPE, text=True) as process:
        mine = wait_for(lambda: _named(stack_cli, "nightly", "in_progress"), "the batch in progress")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"Detached: {mine} goes on" in err
    assert "Traceback" not in err
    other = write_lines(tmp_path / "other.jsonl", [line(99, stack.model)])
    clash = stack_cli("run", other, "-o", tmp_path / "other.out", "--name", "nightly")
    assert clash.code == 2, clash.err
    again = stack_cli("run", source, "-o", tmp_path / "out.jsonl", "--name", "nightly", "--json")
    assert again.code == 0, again.err
    assert again.json["id"] == mine
    assert f"Going on with {mine}" in again.err


def _named(stack_cli: Run, name: str, status: str) -> str | None:
    batches = stack_cli("list", "--json").json["data"]
    return next((batch["id"] for batch in batches if batch["name"] == name and batch["status"] == status), None)
