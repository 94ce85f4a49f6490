"""Steps that fail, hang or kill their process cost themselves alone."""

from __future__ import annotations

import pytest
import torch

from engine.ondevice.crew import Clock, Crew
from engine.ondevice.loads import FORMATS
from engine.ondevice.place import Place
from engine.ondevice.report import Report
from engine.ondevice.speed import steps as speed_steps
from tests.engine.ondevice import drill

PLACE = Place(torch.device("cpu"), is_toy=True)


@pytest.mark.slow
def test_the_rest_is_run_whatever_a_step_does() -> None:
    steps = drill.steps(PLACE)
    crew = Crew("tests.engine.ondevice.drill:steps", steps, True, Clock(600))
    found = list(crew.run(range(len(steps))))
    assert [outcome.step.name for outcome in found] == [step.name for step in steps], "one lane keeps their order"
    told = {outcome.step.name: outcome for outcome in found}
    sound = [told[name].figures for name in ("right", "goes on", "after a break", "after all")]
    assert all(figures is not None and figures["is_toy"] for figures in sound)
    right, on, behind, last = (figures["process"] for figures in sound)
    assert right == on, "a step that says no leaves its process to the next one"
    assert len({on, behind, last}) == 3, "one that breaks the GPU, dies or hangs doesn't"
    assert told["says no"].error == "ValueError: wrong shape"
    assert told["breaks the GPU"].error == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "ended with code -11" in str(told["dies"].error)
    assert "took too long" in str(told["hangs"].error)
    assert told["too long"].is_late and told["too long"].figures is None


def test_lanes_run_every_step_once() -> None:
    steps = drill.steps(PLACE)
    crew = Crew("tests.engine.ondevice.drill:steps", steps, True, Clock(600))
    found = list(crew.run([0, 2, 4, 7], lanes=2))
    assert sorted(outcome.index for outcome in found) == [0, 2, 4, 7]
    assert len({(outcome.figures or {})["process"] for outcome in found}) == 2


def test_a_process_that_cannot_begin_says_why() -> None:
    steps = drill.steps(PLACE)
    (outcome,) = Crew("tests.engine.ondevice.drill:nothing", steps, True, Clock(600)).run([0])
    assert outcome.figures is None and "AttributeError" in str(outcome.error)


def test_a_report_has_every_figure_and_says_what_is_missing() -> None:
    """The steps of `.ci/gpu speed` at their full size, as if a device had answered."""
    from engine.ondevice.crew import Outcome

    steps, report, lines = speed_steps(Place(torch.device("cuda"), is_toy=False)), Report(), []
    answers = {
        "device": {"name": "NVIDIA H200", "arch": "sm_90", "free_bytes": 1, "cpus": 1, "is_shared": False},
        "rates": {"copy_bytes": 4e12, "flops": 7e14},
    }
    for index, step in enumerate(steps):
        kernel, engine = {"seconds": 1e-3, "bytes": 35e8, "flops": 6e11}, {"seconds": 10.0, "tokens": 400_000}
        if "unplanned" in step.name:
            engine = {"seconds": 40.0, "tokens": 400_000}
        figures = answers.get(step.name) or ({} if step.group == "compile" else None)
        figures = figures if figures is not None else dict(kernel if step.group == "kernels" else engine)
        is_late = step.group == "int4"
        outcome = Outcome(index, step, None, "the time is up", True) if is_late else Outcome(index, step, figures)
        lines += report.lines(outcome)
    lines += report.ending()
    found = report.figures()
    assert {one["format"] for one in found["engines"]} == {*FORMATS, "transformers"} - {"int4"}
    assert [one["step"].split(":")[0] for one in found["missing"]] == ["int4"] * 3
    assert report.num_late == 3 and not report.num_failed
    reached = [aim["reached"] for aim in found["aims"]]
    assert reached == [35 / 40, 60 / 70, 40_000, 4, 1], "each aim finds its figure"
    assert len(found["kernels"]) == sum(step.group == "kernels" for step in steps) - 1
    for label in {"bf16", "fp8", "int8 KV"}:
        assert sum(line.startswith(f"{label} ") for line in lines) >= 3
