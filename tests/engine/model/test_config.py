"""Shapes from both kinds of files; what the decoder can't run is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.load.gguf import GGUFFile
from engine.model.config import RopeScaling, config_from_directory, config_from_gguf
from tests.tiny import make_tiny_model


def directory(path: Path, **changes: Any) -> Path:
    model = make_tiny_model(path / "m")
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return model


def test_both_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    old = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0},
    }
    first = config_from_directory(directory(tmp_path / "old", **old))
    assert config_from_directory(directory(tmp_path / "new", **new)) == first
    assert (first.rope_theta, first.rope_scaling) == (500.0, RopeScaling(kind="linear", factor=2.0))


def test_fields_that_may_be_left_out_have_the_usual_meaning(tmp_path: Path) -> None:
    config = config_from_directory(directory(tmp_path, head_dim=..., num_key_value_heads=None, mlp_bias=...))
    assert (config.head_dim, config.num_kv_heads, config.has_mlp_bias) == (16, 4, False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "qwen9"}, "'qwen9'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_key_value_heads": 3}, "4 query heads can't share 3"),
        ({"head_dim": 15}, "15 dimensions"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        config_from_directory(directory(tmp_path, **changes))


@pytest.fixture(scope="module")
def real(default_model: Path) -> GGUFFile:
    return GGUFFile(default_model)


def from_gguf(file: GGUFFile, table: tuple[float, ...] = (), **changes: Any) -> Any:
    fields = file.fields | {key.replace("__", "."): value for key, value in changes.items()}
    return config_from_gguf(fields, file.tensors, file.path, table)


def test_the_default_model_has_its_shape(real: GGUFFile) -> None:
    config = from_gguf(real)
    assert (config.num_layers, config.hidden, config.mlp, config.vocab_size) == (30, 576, 1536, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.is_tied, config.rope_theta, config.context_tokens) == (True, 100_000.0, 8192)
    assert config.rope_scaling is None


def test_gguf_scaling_is_linear_or_a_table(real: GGUFFile) -> None:
    linear = from_gguf(real, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    assert from_gguf(real, (1.0, 2.0)).rope_scaling == RopeScaling(kind="table", table=(1.0, 2.0))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general__architecture": "mamba"}, "'mamba'"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__rope__dimension_count": 32}, "part of each head"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"llama__block_count": None}, "block_count"),
    ],
)
def test_a_gguf_that_cannot_run_is_refused_by_name(real: GGUFFile, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        from_gguf(real, **changes)
