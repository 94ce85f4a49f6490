"""Files that lie: whatever a field says, however its bytes were changed, a model loads or costs one sentence."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.load.gguf import GGUFFile
from engine.load.safetensors import SafetensorsSource
from engine.memory.sources import read_shape
from engine.text import load_text
from tests.engine.load.test_weights import load_model, to_gguf
from tests.tiny import make_tiny_model

Reader = Callable[[Path], object]
READERS: list[Reader] = [load_text, lambda path: load_model(path, torch.float32), read_shape]


def sentence(reader: Reader, path: Path) -> str:
    """What the reader refuses the model with; nothing where it reads it."""
    try:
        reader(path)
    except ModelError as error:
        return str(error)
    return ""


GGUF_KEYS = [
    "general.architecture",
    "llama.context_length",
    "llama.embedding_length",
    "llama.block_count",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
    "llama.rope.dimension_count",
    "llama.rope.scaling.type",
    "llama.expert_count",
    "llama.pooling_type",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
]
GGUF_VALUES: list[Any] = [
    "text",
    True,
    -1,
    1 << 62,
    float("nan"),
    np.array([], np.int32),
    np.array([1, 2], np.int32),
    ["a", "b"],
    [np.array([1], np.int32), np.array([2], np.int32)],
]


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    return to_gguf(make_tiny_model(folder / "hf", layers=1), folder / "model.gguf")


@pytest.mark.parametrize("key", GGUF_KEYS)
def test_any_value_of_a_gguf_field_is_used_or_refused(
    gguf_model: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    read = GGUFFile._read_header

    def read_changed(file: GGUFFile) -> None:
        read(file)
        file.fields[key] = values[0]

    monkeypatch.setattr(GGUFFile, "_read_header", read_changed)
    values: list[Any] = []
    for value in GGUF_VALUES:
        values[:] = [value]
        for reader in READERS:
            assert sentence(reader, gguf_model).count("\n") == 0


CONFIG_KEYS = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "eos_token_id",
    "bos_token_id",
    "quantization_config",
]
CONFIG_VALUES: list[Any] = [
    "text",
    True,
    0,
    -1,
    1 << 30,
    1 << 62,
    1e308,
    float("nan"),
    [],
    [[1]],
    {},
    {"type": [], "rope_theta": "x"},
    {"rope_type": "linear", "factor": -1},
    {"rope_type": "llama3", "factor": float("inf")},
    {"quant_method": []},
    {"quant_method": "gptq", "bits": [4]},
    {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
]


@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_any_value_of_a_config_field_is_used_or_refused(tmp_path: Path, key: str) -> None:
    model = make_tiny_model(tmp_path / "m", layers=1)
    config = json.loads((model / "config.json").read_text())
    for value in CONFIG_VALUES:
        (model / "config.json").write_text(json.dumps(config | {key: value}))
        for reader in READERS:
            assert sentence(reader, model).count("\n") == 0


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "tokenizer.json", "modules.json"])
@pytest.mark.parametrize("content", ["[]", "3", '{"eos_token": [], "eos_token_id": {}}', '{"added_tokens": [1, {}]}'])
def test_any_side_file_is_used_or_refused(tmp_path: Path, file: str, content: str) -> None:
    model = make_tiny_model(tmp_path / "m", layers=1)
    (model / file).write_text(content)
    assert sentence(load_text, model).count("\n") == 0


def test_a_shape_beyond_the_file_is_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 30}))
    with pytest.raises(ModelError, match=r"gate_proj\.weight has the shape \[128, 64\], expected \[1073741824, 64\]"):
        load_model(model, torch.float32)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_numbers_that_are_not_finite_are_refused_by_tensor(tmp_path: Path, name: str, value: float) -> None:
    model = make_tiny_model(tmp_path / "m", layers=1)
    tensors = load_file(model / "model.safetensors")
    tensors[name].flat[-1] = value
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=f"tensor {name} holds numbers that aren't finite"):
        load_model(model, torch.float32)


def test_a_scale_that_is_no_number_is_refused_by_tensor(tmp_path: Path) -> None:
    """Of a GGUF block: its scale is a float16 among the packed bytes."""
    kind = gguf.GGMLQuantizationType.Q8_0
    file = to_gguf(
        make_tiny_model(tmp_path / "hf", layers=1), tmp_path / "m.gguf", quantized={"blk.0.ffn_up.weight": kind}
    )
    info = GGUFFile(file).tensors["blk.0.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    struct.pack_into("<e", data, info.offset, float("nan"))
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.ffn_up\.weight holds numbers that aren't finite"):
        load_model(file, torch.float32)


def one_tensor(**changes: Any) -> bytes:
    """A safetensors file whose header says what `changes` say."""
    tensor = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes
    header = json.dumps({"model.norm.weight": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


LIES = {
    "a header longer than the file": struct.pack("<Q", 1 << 60) + b"{}",
    "a header that is no JSON": struct.pack("<Q", 4) + b"\xff\xff\xff\xff",
    "a header that is a list": struct.pack("<Q", 2) + b"[]",
    "offsets past the end": one_tensor(data_offsets=[0, 1 << 40]),
    "offsets that run backwards": one_tensor(data_offsets=[16, 0]),
    "negative offsets": one_tensor(data_offsets=[-16, 0]),
    "a shape beyond its bytes": one_tensor(shape=[1 << 20, 1 << 20]),
    "a shape whose product overflows": one_tensor(shape=[1 << 33, 1 << 33]),
    "a negative size": one_tensor(shape=[-2, -2]),
    "an unknown type": one_tensor(dtype="F7"),
    "a type that is no text": one_tensor(dtype=7),
}


@pytest.mark.parametrize("what", LIES)
def test_a_safetensors_file_that_lies_is_refused(tmp_path: Path, what: str) -> None:
    model = make_tiny_model(tmp_path / "m", layers=1)
    (model / "model.safetensors").write_bytes(LIES[what])
    with pytest.raises(ModelError, match="no usable safetensors file") as raised:
        SafetensorsSource(model)
    assert "\n" not in str(raised.value)


@settings(max_examples=100, deadline=None)
@given(changes=st.dictionaries(st.integers(0, 600), st.integers(0, 255), min_size=1, max_size=8))
def test_changed_bytes_of_a_safetensors_file_never_crash(
    changes: dict[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path_factory.getbasetemp() / "changed-safetensors"
    if not model.exists():
        make_tiny_model(model, layers=1)
        (model / "model.safetensors").rename(model / "sound")
    data = bytearray((model / "sound").read_bytes())
    for offset, value in changes.items():
        data[offset] = value
    (model / "model.safetensors").write_bytes(data)
    assert sentence(lambda path: load_model(path, torch.float32), model).count("\n") == 0
