"""Shapes read from files count what transformers builds; whatever a hostile file says costs one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.load.gguf import GGUFFile
from engine.memory.formats import kv_format, weight_format
from engine.memory.sizing import Workload, demand, sequence_parts
from engine.memory.sources import read_shape, shape_of_config, shape_of_gguf
from tests.tiny import make_tiny_model

SMALL = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA: dict[str, Any] = {**SMALL, "model_type": "llama", "max_position_embeddings": 512}
HERE = Path("config.json")


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL),
        transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        transformers.LlamaConfig(**SMALL, head_dim=16),
        transformers.MistralConfig(**SMALL),
        transformers.MistralConfig(**SMALL, head_dim=16, sliding_window=None),
        transformers.Qwen2Config(**SMALL),
        transformers.Qwen2Config(**SMALL, tie_word_embeddings=True, use_sliding_window=True, max_window_layers=3),
        transformers.Qwen3Config(**SMALL),
        transformers.Qwen3Config(**SMALL, head_dim=16, attention_bias=True),
        transformers.Gemma3TextConfig(**SMALL),
        transformers.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=64),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_and_windows_are_those_of_transformers(config: transformers.PretrainedConfig) -> None:
    """From the config.json as transformers writes it to disk, which leaves out what is the default."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of_config(json.loads(config.to_json_string()), HERE)
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())
    cache = transformers.DynamicCache(config=config)
    windows = [layer.sliding_window for layer in cache.layers if getattr(layer, "is_sliding", False)]
    assert shape.window_layers == len(windows)
    assert set(windows) <= {shape.window}


def test_real_models_have_the_sizes_of_their_cards() -> None:
    llama3 = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    assert shape_of_config(llama3, HERE).num_parameters == 70_553_706_496
    gemma = {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240}}
    gemma["text_config"] |= {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    shape = shape_of_config(gemma, HERE)
    assert shape.num_parameters == 3_880_263_168
    assert (shape.window, shape.window_layers, shape.is_tied) == (1024, 29, True)


def test_windows_cap_what_their_layers_read_but_not_what_they_keep() -> None:
    gemma = {**SMALL, "model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 7}
    shape = shape_of_config(gemma, HERE)
    one = 2 * 2 * 256 * 2  # K and V, two heads of 256, two bytes
    assert sequence_parts(shape, kv_format("bf16"), 4096, 16).values == one * 7 * 4096, "a block is of all layers"
    assert sequence_parts(shape, kv_format("bf16"), 60, 16).values == one * 7 * 64
    gemma_reads = Workload(context_tokens=4096, concurrency=3, weights=weight_format("16"), kv=kv_format("16"))
    needs = demand(shape, gemma_reads)
    read = needs.weights.total - 2 * shape.embedding  # what is looked up in it is not the whole
    assert needs.step_bytes == read + 3 * one * (4096 + 6 * 64), "reads end where the window does"
    short = demand(shape, replace(gemma_reads, context_tokens=60))
    assert short.step_bytes == read + 3 * one * 7 * 60


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 7}, "model_type"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -4}, "hidden_size"),
        ({"hidden_size": 1e3}, "hidden_size"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": "6"}, "num_attention_heads"),
        ({"num_attention_heads": 10**9}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "KV heads"),
        ({"head_dim": []}, "head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma3_text", "layer_types": ["linear"] * 7}, "layer_types"),
        ({"model_type": "gemma3_text", "layer_types": [[]] * 7}, "layer_types"),
        ({"model_type": "gemma3_text", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "gemma3", "text_config": [1]}, "text_config"),
    ],
)
def test_a_field_that_cannot_be_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as raised:
        shape_of_config({**LLAMA, **changes}, HERE)
    assert str(raised.value).count("\n") == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40)
@given(
    changes=st.dictionaries(
        st.sampled_from([*LLAMA, "head_dim", "layer_types", "sliding_window", "use_sliding_window", "text_config"]),
        JSON | st.sampled_from(["gemma3", "gemma3_text", "qwen2", "qwen3", "mistral"]),
        max_size=4,
    )
)
def test_any_configuration_is_counted_or_refused(changes: dict[str, Any]) -> None:
    try:
        shape = shape_of_config({**LLAMA, **changes}, HERE)
    except ModelError:
        return
    assert shape.num_parameters > 0


def test_a_directory_knows_what_its_weights_take(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    stored = (model / "model.safetensors").stat().st_size
    assert read_shape(model).stored_bytes == read_shape(model / "config.json").stored_bytes == stored
    (model / "model.safetensors").unlink()
    assert read_shape(model).stored_bytes is None
    with pytest.raises(ModelError, match="no model at"):
        read_shape(tmp_path / "absent.gguf")


def write_gguf(path: Path, arch: str = "llama", **changes: Any) -> Path:
    """A GGUF file of two layers; `changes` are fields, or tensors where they are arrays."""
    fields: dict[str, Any] = {
        "context_length": 512,
        "feed_forward_length": 96,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    tensors = {"token_embd.weight": (100, 64), "output_norm.weight": (64,)}
    parts = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    parts |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96), "attn_norm": (64,), "ffn_norm": (64,)}
    tensors |= {f"blk.{layer}.{part}.weight": shape for layer in range(2) for part, shape in parts.items()}
    values = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    for key, value in changes.items():
        if isinstance(value, np.ndarray) or key.endswith("weight"):
            values[key] = value
        else:
            fields[key] = value
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    for name, tensor in values.items():
        if tensor is None:
            continue
        if tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_counted_by_its_table(tmp_path: Path) -> None:
    shape = read_shape(write_gguf(tmp_path / "m.gguf"))
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64
    assert shape.num_parameters == 100 * 64 + 64 + 2 * layer
    assert shape.is_tied
    assert shape.stored_bytes == (100 * 64 + 2 * (layer - 2 * 64)) // 32 * 34 + 4 * (64 + 4 * 64)
    untied = write_gguf(tmp_path / "u.gguf", **{"output.weight": np.ones((100, 64), np.float32)})
    assert read_shape(untied).num_parameters == shape.num_parameters + 100 * 64
    each = write_gguf(tmp_path / "e.gguf", **{"attention.head_count_kv": [2, 2], "rope_freqs.weight": np.ones(8)})
    assert read_shape(each).num_parameters == shape.num_parameters
    gemma = read_shape(write_gguf(tmp_path / "g.gguf", arch="gemma3", **{"attention.sliding_window": 128}))
    assert (gemma.window, gemma.window_layers) == (128, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"arch": "mamba"}, "general.architecture 'mamba'"),
        ({"block_count": 3}, r"lacks the tensor|no tensor blk\.2\.attn_k"),
        ({"block_count": 0}, "block_count"),
        ({"block_count": 2**32 - 1}, "block_count"),
        ({"attention.head_count_kv": 1}, r"blk\.0\.attn_k\.weight has the shape"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"attention.head_count": "four"}, "head_count"),
        ({"attention.head_count": None}, "head_count"),
        ({"attention.key_length": 2**31}, "key_length"),
        ({"expert_count": 8}, "mixture"),
        ({"expert_count": [0, 0]}, "mixture"),
        ({"token_embd.weight": None}, "token_embd"),
        ({"token_embd.weight": np.ones(64, np.float32)}, "token_embd"),
        ({"output.weight": np.ones((90, 64), np.float32)}, "output.weight"),
    ],
)
def test_a_gguf_file_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        shape_of_gguf(GGUFFile(write_gguf(tmp_path / "bad.gguf", **changes)))
