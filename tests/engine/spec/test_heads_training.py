"""Heads are trained from a file of lines, go on after a stop with the same bits, and draft for their teacher."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.distill.errors import DistillError, StoppedError
from engine.distill.heads import BATCH_ROWS, HeadsRun, Rows, batch_of, num_heads
from engine.distill.options import Options
from engine.engine import Engine
from engine.load.origin import draft_project_of, project_of
from engine.request import Request, SamplingParams
from engine.spec.heads_file import read_heads

QUESTIONS = ["What is wrong with my order?", "Was the parcel late?", "Thank you for the reply!", "Is it in Berlin?"]


@pytest.fixture
def options(tiny_model: Path, tmp_path: Path) -> Options:
    lines = [
        {"custom_id": str(i), "body": {"messages": [{"role": "user", "content": f"{i}: {QUESTIONS[i % 4]}"}],
                                       "max_tokens": 30, "temperature": 0, "ignore_eos": True}}
        for i in range(16)
    ]  # fmt: skip
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Options(
        teacher=str(tiny_model), student="heads:2", data=data, target=tmp_path / "made", steps=40, lr=5e-3, threads=1,
        project="proj_1", licence="mine", draft_vocab=128, checkpoint_steps=1, seed=3, eval_lines=2,
    )  # fmt: skip


def test_from_lines_to_heads_that_draft(options: Options, tiny_model: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny_model, teacher)
    (teacher / "NOTICE").write_text("By us.")
    options = replace(options, teacher=str(teacher))
    told: list[dict[str, Any]] = []
    done = HeadsRun(options, told.append, lambda: False).run()
    assert {line["phase"] for line in told if "phase" in line} >= {"answers", "capture", "train"}
    losses = [line["loss"] for line in told if line.get("phase") == "train"]
    assert len(losses) == 40 and losses[-1] < losses[0]
    assert done["steps"] == 40 and done["accepted_per_verify"] is not None and len(done["right"]) == 2
    assert (options.target / "distillation" / "loss.svg").exists() and not options.work.exists()
    assert project_of(options.target) == draft_project_of(options.target) == "proj_1"
    assert (options.target / "NOTICE").read_text() == "By us."
    config = EngineConfig(
        model=str(tiny_model), spec="heads", draft=str(options.target), num_blocks=64, threads=1, device="cpu"
    )
    engine = Engine(config)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    request = Request(id="r", prompt_ids=list(range(40, 60)), params=params)
    (found,) = engine.run([request])
    (plain,) = Engine(replace(config, spec="off", draft=None)).run([request])
    assert found.token_ids == plain.token_ids and engine.stats().drafted_tokens > 0
    with pytest.raises(DistillError, match="exists already"):
        HeadsRun(options, told.append, lambda: False).run()


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(options: Options, tmp_path: Path) -> None:
    seen: list[str] = []

    def told(line: dict[str, Any]) -> None:
        seen.append(line.get("phase", ""))

    for phase, times in (("capture", 3), ("train", 110)):  # more steps than lie between checkpoints
        seen.clear()
        asked = replace(options, steps=120, resume=options.work.exists())
        with pytest.raises(StoppedError):
            HeadsRun(asked, told, lambda phase=phase, times=times: seen.count(phase) >= times).run()
        if phase == "capture":  # killed while the rows of the fourth line were written
            rows = np.load(options.work / "rows.npy", mmap_mode="r+")
            first = int((rows[:, -1] == 0).argmax())
            rows[first : first + 20, :-1] = 1
    seen.clear()
    HeadsRun(replace(options, steps=120, resume=True), told, lambda: False).run()
    assert seen.count("train") < 120, "it goes on where it was stopped"
    whole = replace(options, steps=120, target=tmp_path / "whole")
    HeadsRun(whole, lambda line: None, lambda: False).run()
    assert (options.target / "heads.safetensors").read_bytes() == (whole.target / "heads.safetensors").read_bytes()


@pytest.mark.parametrize("rest", [1, 17, 64])
def test_every_epoch_sees_every_row_once(rest: int) -> None:
    """Where few are left at the end, they belong to the batch before: of a single one nothing can be learned."""
    count = (3 if rest >= 64 else 4) * BATCH_ROWS + rest
    rows = Rows(np.arange(count, dtype=np.float16)[:, None], torch.arange(count), torch.zeros(count, dtype=torch.int64))
    for epoch in range(2):
        found = [batch_of(rows, 4 * epoch + place, seed=5) for place in range(4)]
        assert torch.cat([batch.next_ids for batch in found]).sort().values.equal(torch.arange(count))
    orders = [[int(batch_of(rows, 4 * epoch + place, seed=5).next_ids[0]) for place in range(4)] for epoch in range(6)]
    assert len({tuple(order) for order in orders}) > 1
    assert all(len(batch.next_ids) >= 64 for batch in found)


def test_a_wrong_number_of_heads_is_refused() -> None:
    assert num_heads("heads:4") == 4
    for spelled in ("heads:0", "heads:17", "heads:", "heads:four", "heads:1000000"):
        with pytest.raises(DistillError, match="between 1 and 16"):
            num_heads(spelled)


def test_heads_of_a_run_name_their_model(options: Options, tiny_model: Path) -> None:
    HeadsRun(replace(options, steps=1), lambda line: None, lambda: False).run()
    values = json.loads((options.target / "heads.json").read_text())
    assert values["model"] == str(tiny_model) and values["vocabulary"] == 128
    asked = {"model": "it", "hidden": values["hidden"], "vocab_size": values["vocab_size"]}
    assert read_heads(options.target, model_digest=values["model_digest"], **asked).num_heads == 2
