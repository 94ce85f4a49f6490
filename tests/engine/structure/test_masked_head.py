"""Masks that the head applies give the tokens that masked logits give; masks made ahead are those of their answers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.sample.row import SampleRow
from engine.sched.plan import Chunk, StepPlan, StepResult
from engine.structure.forms import Forms
from engine.structure.grammar import spec_of
from engine.text import TextModel, load_text
from tests.schemas import random_schema
from tests.tiny import make_tiny_model

GREEDY = SamplingParams(max_tokens=30, temperature=0)
PLAN = StepPlan(step=0, chunks=())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the shape that the fused CPU kernels serve."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "fused", hidden=128, mlp=192, heads=4, kv_heads=2)


def run(model: Path, weight_format: str, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    kv_format = "float32" if weight_format == "float32" else "bf16"
    config = EngineConfig(
        model=str(model),
        weight_format=weight_format,
        kv_format=kv_format,
        num_blocks=400,
        threads=2,
        reproducible=weight_format != "float32",
    )
    runner = ModelRunner(config)
    assert runner.kernels.is_fused == (weight_format != "float32")
    engine = Engine(config, runner=runner, text=load_text(str(model)))
    return {completion.request_id: completion.token_ids for completion in engine.run(requests)}


def mixed_requests() -> list[Request]:
    """Forms, ends that wait, both, and neither, greedy and drawn, by turns."""
    params = []
    for seed in range(24):
        form = spec_of("json", random_schema(seed)) if seed % 2 else ""
        drawn = {"temperature": 1.0, "seed": seed} if seed % 5 == 0 else {}
        params.append(replace(GREEDY, grammar=form, min_tokens=20 * (seed % 3 == 0), ignore_eos=seed % 4 == 3, **drawn))
    return [
        Request(id=f"{index}", prompt_ids=list(range(20, 30 + index)), params=mine) for index, mine in enumerate(params)
    ]


@pytest.mark.parametrize("weight_format", ["int8", "bf16", "float32"])
def test_the_head_finds_the_tokens_that_masked_logits_give(
    model: Path, weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests()
    through_head = run(model, weight_format, requests)
    free = [replace(request) for request in requests if not request.params.grammar]
    alone = run(model, weight_format, free)
    assert {name: through_head[name] for name in alone} == alone, "forms beside them change no token of the others"
    monkeypatch.setattr(SampleRow, "is_argmax", False)
    assert run(model, weight_format, requests) == through_head


@pytest.fixture(scope="module")
def text(model: Path) -> TextModel:
    return load_text(str(model))


def make_forms(text: TextModel) -> Forms:
    return Forms(text, vocab_size=text.meta.vocab_size, eos_ids=text.meta.eos_ids)


def begin(forms: Forms, name: str, *texts: str) -> None:
    params = replace(GREEDY, grammar=spec_of("choice", list(texts)))
    assert forms.start(Request(id=name, prompt_ids=[5], params=params)) is not None


def plan_of(*names: str) -> StepPlan:
    chunks = [
        Chunk(
            seq_id=name,
            token_ids=(5,),
            start=0,
            block_ids=(0,),
            logit_rows=(0,),
            params=GREEDY,
            num_prompt_tokens=1,
        )
        for name in names
    ]
    return replace(PLAN, chunks=tuple(chunks))


def spelled(text: TextModel, mask: np.ndarray) -> set[bytes]:
    """The first letters of what may come."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: text.meta.vocab_size]
    return {text.tokenizer.spelled(token_id)[:1] for token_id in np.flatnonzero(bits).tolist()}


def test_masks_made_ahead_are_those_of_the_answers_that_want_them(text: TextModel) -> None:
    """One answer is left out of a step, another's id comes back with another form."""
    forms = make_forms(text)
    (a,) = text.tokenizer.encode("a")
    for name in ("stays", "waits", "ends"):
        begin(forms, name, "ab", "ac")
    plan = forms.masked(plan_of("stays", "waits", "ends"))
    assert [spelled(text, plan.masks[name]) for name in ("stays", "waits", "ends")] == [{b"a"}] * 3
    forms.follow(plan, StepResult(dict.fromkeys(plan.masks, (a,)), {}))
    forms.end("ends")
    begin(forms, "ends", "xy")
    plan = forms.masked(plan_of("stays", "ends"))
    assert {name: spelled(text, mask) for name, mask in plan.masks.items()} == {"stays": {b"b", b"c"}, "ends": {b"x"}}
    forms.follow(plan, StepResult({}, {}))  # a step that was taken back: nothing was sampled
    plan = forms.masked(plan_of("waits", "stays"))
    assert {name: spelled(text, mask) for name, mask in plan.masks.items()} == {
        "waits": {b"b", b"c"},
        "stays": {b"b", b"c"},
    }
    assert forms.masked(plan_of()).masks == {}
    copy = pickle.loads(pickle.dumps(plan)).masks
    assert {name: spelled(text, mask) for name, mask in copy.items()} == {name: {b"b", b"c"} for name in plan.masks}
