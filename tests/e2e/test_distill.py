"""`batchsvc models distill` on a finished batch: fetched by its key, trained, registered for its project alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from engine.load.origin import project_of
from tests.e2e.conftest import CommandLine, Result, Stack, line, write_lines


def test_a_batch_trains_a_student_that_only_its_project_can_use(
    stack: Stack, stack_cli: Callable[..., Result], cli: CommandLine, tmp_path: Path
) -> None:
    rows = [line(number, stack.model, temperature=0) for number in range(8)]
    ran = stack_cli("run", write_lines(tmp_path / "in.jsonl", rows), "-o", tmp_path / "out.jsonl", "--json")
    assert ran.code == 0, ran.err
    batch, made = ran.json["id"], tmp_path / "made"
    argv = ["models", "distill", "--teacher", stack.model, "--student", "layers:1", "--data", batch, "-o", made]
    argv += ["--steps", 2, "--threads", 1, "--json"]
    refused = stack_cli(*argv)
    assert refused.code == 2 and "--accept-licence" in refused.err

    done = stack_cli(*argv, "--accept-licence")
    assert done.code == 0, done.err
    assert "8 lines to learn from." in done.err and "Training: 2 of 2, loss" in done.err
    assert done.json["trained_lines"] == 7 and done.json["registered_as"] == str(made)
    assert project_of(made) == ran.json["project_id"]

    mine = {row["id"]: row for row in stack_cli("models", "list", "--json").json["data"]}
    assert mine[str(made)]["owned_by"] == ran.json["project_id"]
    state = json.loads((stack.directory.root / "run" / "state.json").read_text())
    other = stack_cli("keys", "create", "other", "--project", "stranger", "--json").json["key"]
    elsewhere = ["--url", state["url"], "--api-key", other]
    assert str(made) not in {row["id"] for row in cli("models", "list", *elsewhere, "--json").json["data"]}
    asked = cli("submit", write_lines(tmp_path / "theirs.jsonl", [line(1, str(made))]), *elsewhere, "--json")
    assert asked.code != 0 or cli("watch", asked.json["id"], *elsewhere).code == 4
    theirs = cli(*argv[:8], "-o", tmp_path / "b", "--accept-licence", *elsewhere)
    assert theirs.code != 0 and batch in theirs.err, "another project's batch can't be read"
    assert not (tmp_path / "b").exists()
