"""A whole distillation of a tiny model: a directory that runs, drafts and knows its origin; killed and resumed."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.distill import checkpoint, evaluate, report
from engine.distill import heads as heads_module
from engine.distill import run as run_module
from engine.distill.errors import DistillError, StoppedError, memory_told
from engine.distill.heads import HeadsRun
from engine.distill.lines import Line
from engine.distill.options import Options, entered
from engine.distill.run import Run
from engine.engine import Engine
from engine.errors import ConfigError
from engine.load.draft_vocab import draft_vocab
from engine.load.meta import read_meta
from engine.load.origin import FILE, project_of
from engine.quant.__main__ import quantize
from engine.request import Request, SamplingParams
from tests.tiny import make_tiny_model

WORDS = ("parcel", "refund", "delivery", "order", "customer", "ticket", "Berlin", "reply")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "teacher", layers=3)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = []
    for number in range(12):
        system = {"role": "system", "content": "You are a helpful assistant that reads tickets."}
        messages = [system, {"role": "user", "content": f"Where is the {WORDS[number % 8]} {number}?"}]
        body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        rows.append(json.dumps({"custom_id": str(number), "body": body}))
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "in.jsonl"


def options(teacher: Path, data: Path, **changes: Any) -> Options:
    given = {"steps": 12, "pack_tokens": 256, "precision": "float32", "threads": 1, "checkpoint_steps": 3, "lr": 3e-3}
    given |= {"student": "layers:2"} | changes
    if given["student"].startswith("heads:"):
        del given["pack_tokens"]
    return Options(teacher=str(teacher), data=data, target=data.parent / "made", **given)


def go(asked: Options, tell: Any = lambda line: None, is_stopped: Any = lambda: False) -> dict[str, Any]:
    return Run(asked, tell, is_stopped).run()


def test_a_student_runs_drafts_and_says_where_it_comes_from(teacher: Path, data: Path) -> None:
    told: list[dict[str, Any]] = []
    done = go(options(teacher, data, draft_vocab=100, project="proj_1", batch="batch_1", kl="both"), told.append)
    made = data.parent / "made"
    assert done["trained_lines"] == 11 and done["held_out_lines"] == 1 and done["steps"] == 12
    losses = [line["loss"] for line in told if line.get("phase") == "train"]
    assert losses[-1] < losses[0]
    assert {line["phase"] for line in told if "phase" in line} == {"answers", "capture", "train", "report"}
    lineage = json.loads((made / FILE).read_text())
    assert lineage["distilled_from"]["digest"] == read_meta(teacher).digest
    assert (lineage["project"], lineage["data"], lineage["layers"]) == ("proj_1", "batch_1", [0, 2])
    assert sorted(file.name for file in (made / "distillation").iterdir()) == ["loss.svg", "report.json", "report.md"]
    assert not options(teacher, data).work.exists()
    scored = draft_vocab(made, 384)
    assert scored is not None and len(scored) == 128 and set(read_meta(teacher).eos_ids) <= set(scored)
    prompt = [1, *range(40, 60)]
    plain, drafted = (answer(EngineConfig(model=str(teacher), **more), prompt) for more in ({}, {"draft": str(made)}))
    assert plain == drafted
    assert len(answer(EngineConfig(model=str(made)), prompt)) == 20, "as a model it has its whole head"
    quantize(str(made), made.parent / "small", method="rtn", bits=8, group=32, layout="gptq", symmetric=True)
    assert project_of(made.parent / "small") == project_of(made) == "proj_1", "a copy is as bound as the student"
    with pytest.raises(DistillError, match="lines of another project"):
        go(replace(options(made, data), student="layers:1", target=data.parent / "b", project="proj_2"))


def answer(config: EngineConfig, prompt: list[int]) -> tuple[int, ...]:
    config = replace(config, num_blocks=64, device="cpu", threads=1)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    (completion,) = Engine(config).run([Request(id="r", prompt_ids=prompt, params=params)])
    return completion.token_ids


def test_a_draft_proposes_only_what_it_scores(teacher: Path, data: Path) -> None:
    from engine.loaded import from_files
    from engine.runner import ModelRunner
    from tests.engine.stepping import Stepper

    go(options(teacher, data, draft_vocab=64, steps=2))
    made = data.parent / "made"
    config = EngineConfig(model=str(made), num_blocks=16, device="cpu", weight_format="float32", kv_format="float32")
    prompt = [list(range(40, 60))]
    whole = Stepper(ModelRunner(config), prompt).logits([20])[0]
    drafts = Stepper(ModelRunner(config, loaded=from_files(config, drafts=True)), prompt).logits([20])[0]
    scored = torch.tensor(draft_vocab(made, 384))
    assert torch.allclose(whole[:, scored], drafts[:, scored], atol=1e-5)
    rest = torch.ones(384, dtype=torch.bool)
    rest[scored] = False
    assert bool((drafts[:, rest] < -1e29).all())


@pytest.mark.parametrize("method", ["soft", "transcripts"])
def test_a_run_that_was_stopped_or_killed_makes_the_same_student(teacher: Path, data: Path, method: str) -> None:
    asked = options(teacher, data, method=method)
    go(replace(asked, target=data.parent / "whole"))
    phases: list[str] = []

    def stopping(phase: str, done: int) -> Any:
        seen: list[int] = []

        def tell(line: dict[str, Any]) -> None:
            phases.append(line.get("phase", ""))
            if line.get("phase") == phase and line["done"] == done:
                seen.append(done)

        return tell, lambda: bool(seen)

    for resume, phase, done in ((False, "answers", 2), (True, "capture", 5), (True, "train", 5)):
        tell, is_stopped = stopping(phase, done)
        with pytest.raises(StoppedError):
            go(replace(asked, resume=resume), tell, is_stopped)
    with pytest.raises(DistillError, match="unfinished run: go on with --resume"):
        go(asked)
    with pytest.raises(DistillError, match="another seed"):
        go(replace(asked, resume=True, seed=1))

    def die(line: dict[str, Any]) -> None:
        if line.get("phase") == "train" and line["done"] == 8:
            raise SystemExit(9)

    with pytest.raises(SystemExit):
        go(replace(asked, resume=True), die)
    go(replace(asked, resume=True))
    one, other = (load_file(data.parent / name / "model.safetensors") for name in ("whole", "made"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_memory_that_does_not_suffice_is_told_in_a_sentence() -> None:
    """As torch says it, as Python does, and as the kernel does of what is mapped; nothing else is taken for it."""
    for asking in (
        lambda: torch.empty(2**56, dtype=torch.uint8),
        lambda: bytearray(2**62),
        lambda: mmap.mmap(-1, 2**56, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    ):
        with (
            pytest.raises(DistillError, match=r"^Memory doesn't suffice for this step: take less\.$"),
            memory_told("take less"),
        ):
            asking()
    for other in (OSError(2, "no such file"), RuntimeError("shapes differ")):
        with pytest.raises(type(other), match=r"no such file|shapes differ"), memory_told("take less"):
            raise other


def test_a_step_of_heads_that_lacks_memory_names_what_makes_it_smaller(
    teacher: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = options(teacher, data, student="heads:2")
    with monkeypatch.context() as patch:
        patch.setattr(heads_module, "heads_loss", lambda *args: torch.empty(2**56, dtype=torch.uint8))
        with pytest.raises(DistillError, match=r"go on with --resume and a smaller --draft-vocab\.$"):
            HeadsRun(asked, lambda line: None, lambda: False).run()

    def stopped(line: dict[str, Any]) -> None:
        if line.get("phase") == "train" and line["done"] == 10:
            raise SystemExit(9)

    resumed = replace(asked, resume=True, draft_vocab=64)
    with pytest.raises(SystemExit):
        HeadsRun(resumed, stopped, lambda: False).run()
    kept = checkpoint.load(asked.work)
    assert kept is not None and kept[0].step == 9, "every 3 steps, as it was told"
    assert HeadsRun(resumed, lambda line: None, lambda: False).run()["steps"] == 12


def test_heads_whose_teacher_lacks_memory_go_on_with_what_is_smaller(
    teacher: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way out that is told may be gone: fewer lines are another run."""
    asked = options(teacher, data, student="heads:2")

    def refused(*_: Any, **__: Any) -> Any:
        return mmap.mmap(-1, 2**56, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    with monkeypatch.context() as patch:
        patch.setattr(heads_module, "Scorer", refused)
        with pytest.raises(
            DistillError, match=r"^Memory doesn't suffice for this step: give a smaller --draft-vocab, or "
        ):
            HeadsRun(asked, lambda line: None, lambda: False).run()
    with pytest.raises(DistillError, match="holds a run with another lines"):
        HeadsRun(replace(asked, resume=True, lines=asked.lines - 1), lambda line: None, lambda: False).run()
    assert HeadsRun(replace(asked, resume=True, draft_vocab=64), lambda line: None, lambda: False).run()["steps"] == 12


LIMITED = """
import resource, sys
import engine.distill.heads
from engine.distill.__main__ import main
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (int(sys.argv[1]) << 20),) * 2)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_says_what_takes_less_and_goes_on_with_that(tmp_path: Path) -> None:
    """The kernel refuses it memory in the middle of training."""
    wide = make_tiny_model(tmp_path / "wide", hidden=128, mlp=4096, context_tokens=1024)
    rows = [
        {"custom_id": str(n), "body": {"messages": [{"role": "user", "content": f"{n} word " * 80}],
                                       "max_tokens": 12, "temperature": 0, "ignore_eos": True}}
        for n in range(12)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def trained(*more: str) -> tuple[int, dict[str, Any], list[str]]:
        argv = ["600", str(wide), str(tmp_path / "student"), "--data", str(tmp_path / "in.jsonl"), "--steps", "3"]
        argv += ["--student", "layers:1", "--threads", "1", "--precision", "float32", *more]
        env = os.environ | {"MALLOC_ARENA_MAX": "1"}  # each further one would map what nobody uses
        command = [sys.executable, "-c", LIMITED, *argv]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert "Traceback" not in ended.stderr, ended.stderr
        told = [json.loads(line) for line in ended.stdout.splitlines()]
        return ended.returncode, told[-1], [line["phase"] for line in told if "phase" in line]

    code, last, phases = trained("--pack-tokens", "8192")
    assert code == 1 and "answers" in phases
    assert last == {"error": "Memory doesn't suffice for this step: go on with --resume and a smaller --pack-tokens."}
    code, last, phases = trained("--pack-tokens", "256", "--resume")
    assert code == 0 and last["steps"] == 3, last
    assert "answers" not in phases, "nothing of what was said before is lost"


@pytest.mark.slow
@pytest.mark.parametrize(("student", "killed_at", "checkpoint_steps"), [("layers:2", 5, 2), ("heads:2", 230, 100)])
def test_a_process_that_is_killed_or_interrupted_leaves_a_checkpoint(
    teacher: Path, data: Path, student: str, killed_at: int, checkpoint_steps: int
) -> None:
    """kill -9 in the middle of training, then SIGINT, which loses no step."""
    asked = options(teacher, data, student=student)
    argv = [sys.executable, "-m", "engine.distill", str(teacher), str(asked.target), "--student", student]
    argv += ["--data", str(data), "--steps", "5000", "--checkpoint-steps", str(checkpoint_steps), "--threads", "1"]
    firsts, lasts = [], []
    for number in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen([*argv, *["--resume"] * len(firsts)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            steps = []
            for line in process.stdout:
                if (value := json.loads(line)).get("phase") == "train":
                    steps.append(value["done"])
                    if len(steps) == killed_at:
                        os.kill(process.pid, number)
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[number]
        firsts.append(steps[0])
        lasts.append(steps[-1])
    assert firsts[0] == 1 and firsts[1] >= killed_at - checkpoint_steps + 1 and firsts[1] > lasts[0] - checkpoint_steps
    assert value == {"stopped": "Stopped; the same command with --resume goes on."}
    kept = checkpoint.load(asked.work)
    assert kept is not None and kept[0].step == lasts[1]


def test_bad_input_is_a_sentence(teacher: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, says in (
        ({"temperature": 0.0}, "--temperature can't be 0.0"),
        ({"holdout": 1.0}, "--holdout can't be"),
        ({"resume": True}, "no unfinished run"),
        ({"student": "heads:2", "kl": "reverse"}, "--kl has no effect on heads"),
        ({"student": "heads:2", "embeddings": True}, "--train-embeddings has no effect on heads"),
        ({"target": data.parent}, "exists already"),
    ):
        with pytest.raises(DistillError, match=says):
            go(replace(options(teacher, data), **changes))
    told: list[dict[str, Any]] = []
    with pytest.raises(DistillError, match="the teacher has 3 layers"):
        go(options(teacher, data, student="layers:99"), told.append)
    monkeypatch.setattr(run_module, "available_bytes", lambda: 1000)
    for kind, student in ((Run, "layers:2"), (HeadsRun, "heads:2")):
        with pytest.raises(DistillError, match="GB more memory"):
            kind(options(teacher, data, student=student), told.append, lambda: False).run()
    assert not told and not options(teacher, data).work.exists(), "nothing was computed, nothing is left"


def test_a_run_is_alone_in_its_folder_which_is_closed_to_others(teacher: Path, data: Path) -> None:
    asked = options(teacher, data)
    with entered(asked, "digest", print) as work:
        assert work.stat().st_mode & 0o777 == 0o700
        with pytest.raises(DistillError, match="Another run is at work"):
            go(replace(asked, resume=True))


def test_what_only_training_depends_on_may_change(teacher: Path, data: Path) -> None:
    asked, said = options(teacher, data), list[str]()
    with entered(asked, "digest", said.append) as work:
        checkpoint.save(work, checkpoint.Progress(step=3), {"a": torch.ones(1)})
    with entered(replace(asked, resume=True, threads=2), "digest", said.append):
        assert checkpoint.load(work) is not None and not said
    with entered(replace(asked, resume=True, student="layers:1", lr=1e-3), "digest", said.append):
        assert checkpoint.load(work) is None
    assert said == [
        "Training begins anew, as --student, --lr is another than before; answers and what was captured are kept."
    ]
    with entered(replace(asked, resume=True, student="layers:1", lr=1e-3), "digest", said.append):
        assert len(said) == 1, "that is what is known now"
    for changes, digest in (({"samples": 1}, "digest"), ({"project": "other"}, "digest"), ({}, "other")):
        again = replace(asked, resume=True, student="layers:1", lr=1e-3, **changes)
        with pytest.raises(DistillError, match="holds a run with another"), entered(again, digest, said.append):
            pass


def test_a_draft_of_long_prompts_and_short_answers_is_measured(teacher: Path, data: Path) -> None:
    """However little it would be worth in a job; where nothing can be drafted, the report says why."""
    config = EngineConfig(model=str(teacher), draft=str(teacher), spec="draft", num_blocks=128, device="cpu", threads=1)
    line = Line(1, tuple(range(40, 340)), tuple(range(40, 46)), SamplingParams(max_tokens=6))
    shown = evaluate.acceptance(config, [line]).shown()
    assert shown["accepted_per_verify"] > 1 and shown["accepted_says"] is None
    shown = evaluate.acceptance(config, [line._replace(answer=(40, 41))]).shown()
    assert shown["accepted_per_verify"] is None and "have 2 tokens at most" in shown["accepted_says"]
    assert "isn't measured: nothing was proposed: the held-out" in report.markdown({"teacher": "it", **shown})


def test_a_draft_of_another_vocabulary_or_damaged_is_refused(teacher: Path, tmp_path: Path) -> None:
    from engine.errors import ModelError

    other = make_tiny_model(tmp_path / "other", layers=1, vocab_size=320)
    with pytest.raises(ConfigError, match="another vocabulary"):
        Engine(EngineConfig(model=str(teacher), draft=str(other), num_blocks=16, device="cpu"))
    for ids in ([], [3, 3], [9, 4], [384], "all"):
        (teacher.parent / "v").mkdir(exist_ok=True)
        (teacher.parent / "v" / "draft_vocab.json").write_text(json.dumps({"token_ids": ids}))
        with pytest.raises(ModelError, match=r"draft_vocab\.json"):
            draft_vocab(teacher.parent / "v", 384)
