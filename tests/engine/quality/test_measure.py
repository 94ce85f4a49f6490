"""Figures of real forward passes are those of the logits, and the default model keeps its limits in int8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.quality.limits import INT8, INT8_KV
from engine.quality.measure import Reference, measure
from engine.quality.text import read_windows
from engine.text import load_text
from tests.engine.stepping import Stepper, make_runner
from tests.tiny import make_tiny_model


def test_figures_are_those_of_the_logits(tiny_model: Path, tmp_path: Path) -> None:
    """Of another model with the same tokenizer, all positions of two windows at once."""
    other = make_tiny_model(tmp_path / "other", seed=1)
    file = tmp_path / "text.txt"
    file.write_text("Order 1234567 was shipped to Berlin on 3 May, and the customer is late. " * 40, "utf-8")
    found = Reference(str(tiny_model), file=file).compare(str(other), "float32", "float32")
    windows = read_windows(load_text(tiny_model), file, 10**6)
    assert len(windows) > 1
    p, q = (
        torch.cat([part[:-1] for part in Stepper(make_runner(model), windows).logits([64])]).double().log_softmax(-1)
        for model in (tiny_model, other)
    )
    following = torch.tensor([token for window in windows for token in window[1:]])[:, None]
    kl = (p.exp() * (p - q)).sum(-1)
    assert found.tokens == len(following)
    assert found.kl == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found.tail[-1] == pytest.approx(float(kl.max()), rel=1e-4)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=0.002)
    assert found.reference_perplexity == pytest.approx(float((-p.gather(1, following)).mean().exp()), rel=1e-4)
    ratio = float((p.gather(1, following) - q.gather(1, following)).mean().exp())
    assert found.perplexity == pytest.approx(ratio, rel=1e-4)


def test_a_model_costs_itself_nothing(tiny_model: Path) -> None:
    found = measure(str(tiny_model), "float32", "float32")
    assert (found.kl, found.top1) == (pytest.approx(0, abs=1e-6), 1.0)
    assert found.perplexity == pytest.approx(1, abs=1e-6)
    assert found.weight_format == found.kv_format == "float32"


@pytest.mark.slow
def test_int8_stays_within_its_limits_on_the_default_model(default_model: Path) -> None:
    """On all of our text: a perplexity tells little of fewer tokens."""
    reference = Reference(str(default_model))
    weights, kv = (reference.compare(str(default_model), *pair) for pair in (("int8", "bf16"), ("bf16", "int8")))
    assert INT8.holds(weights), weights
    assert INT8_KV.holds(kv), kv
    assert min(weights.top1, kv.top1) > 0.9
