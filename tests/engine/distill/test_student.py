"""A student begins with its teacher's layers, and a shape that these can't be copied into is refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.distill import student
from engine.distill.errors import DistillError
from engine.load.meta import read_meta
from engine.load.weights import open_model
from engine.model.config import config_from_directory
from engine.quant.save import save_plain
from tests.families import gemma3, make_family, mistral, qwen2, qwen3
from tests.tiny import make_tiny_model


@given(total=st.integers(1, 80), data=st.data())
def test_layers_are_evenly_spread(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, total))
    layers = student.spread(count, total)
    assert len(set(layers)) == count and list(layers) == sorted(layers)
    assert layers[0] == 0 and (count == 1 or layers[-1] == total - 1)
    gaps = [after - before for before, after in pairwise(layers)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_it_has_the_teachers_weights(tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", layers=5)
    begun = student.begin(teacher, "layers:3")
    _, source = open_model(teacher)
    assert begun.layers == (0, 2, 4) and begun.config.num_layers == 3
    for mine, place in enumerate(begun.layers):
        assert torch.equal(begun.parameters[f"{mine}.down.weight"], source.load(f"{place}.down.weight").float())
    assert "embedding.weight" not in student.trainable(begun, embeddings=False)
    assert "embedding.weight" in student.trainable(begun, embeddings=True)


@pytest.mark.parametrize("config", [mistral, qwen2, qwen3, gemma3])
def test_what_is_saved_is_the_student_of_any_family(tmp_path: Path, config: Callable[..., Any]) -> None:
    teacher = make_family(tmp_path / "teacher", config())
    begun = student.begin(teacher, "layers:2")
    made = tmp_path / "made"
    save_plain(made, read_meta(teacher), begun.config, begun.values, sorted(begun.parameters.items()), {})
    assert config_from_directory(made) == begun.config
    again = student.begin(made, "layers:2")
    for name, tensor in begun.parameters.items():
        assert torch.allclose(again.parameters[name], tensor, rtol=1e-2, atol=1e-2), name
    assert read_meta(made).eos_ids == read_meta(teacher).eos_ids


def shaped(teacher: Path, folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    values = json.loads((teacher / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder / "config.json")


def test_a_smaller_shape_keeps_the_strongest_channels(tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", layers=4, mlp_bias=True)
    begun = student.begin(teacher, shaped(teacher, tmp_path / "s", num_hidden_layers=2, intermediate_size=32))
    assert begun.layers == (0, 3) and begun.config.mlp == 32
    assert begun.parameters["1.up.weight"].shape == (32, 64) and begun.parameters["1.up.bias"].shape == (32,)
    assert begun.parameters["1.down.weight"].shape == (64, 32)
    whole = student.begin(teacher, "layers:2").parameters
    strength = (
        whole["1.gate.weight"].norm(dim=1) * whole["1.up.weight"].norm(dim=1) * whole["1.down.weight"].norm(dim=0)
    )
    kept = begun.parameters["1.gate.weight"].norm(dim=1) * begun.parameters["1.up.weight"].norm(dim=1)
    kept *= begun.parameters["1.down.weight"].norm(dim=0)
    assert torch.allclose(kept.sort().values, strength.topk(32).values.sort().values)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 400}, "vocab_size 400, the teacher 384"),
        ({"hidden_size": 32, "head_dim": 8}, "hidden_size 32, the teacher 64"),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1, the teacher 2"),
        ({"rope_theta": 500.0}, "rope_theta 500.0"),
        ({"model_type": "mistral"}, "model_type mistral, the teacher llama"),
        ({"num_hidden_layers": 9}, "num_hidden_layers 9, more than the teacher's 2"),
        ({"intermediate_size": 999}, "intermediate_size 999, more than"),
        ({"model_type": "t5"}, "can't be used"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    teacher = make_tiny_model(tmp_path / "teacher")
    with pytest.raises(DistillError, match=says):
        student.begin(teacher, shaped(teacher, tmp_path / "s", **changes))


@pytest.mark.parametrize("spec", ["layers:0", "layers:3", "layers:x", "nowhere.json", "layers"])
def test_a_student_that_cannot_be_is_refused(tmp_path: Path, spec: str) -> None:
    with pytest.raises(DistillError):
        student.begin(make_tiny_model(tmp_path / "teacher"), spec)
