"""Weights arrive whole: the same model from safetensors and GGUF, and no tensor missing, left over or misshapen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.kernels.torch_tier import TorchKernels
from engine.load.meta import read_meta
from engine.load.weights import load_weights, open_model
from engine.model.config import ModelConfig
from engine.model.layers import Weights
from tests.engine.stepping import Stepper, make_runner
from tests.tiny import make_tiny_model

Tensors = dict[str, np.ndarray]

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def load_model(path: Path, dtype: torch.dtype) -> tuple[ModelConfig, Weights]:
    config, source = open_model(read_meta(path).path)
    kernels = TorchKernels(config, weight_format="float32", kv_format="float32", block_tokens=16)
    return config, load_weights(config, source, kernels, dtype)


def to_gguf(
    source: Path,
    target: Path,
    *,
    rope_table: list[Any] | None = None,
    quantized: dict[str, gguf.GGMLQuantizationType] | None = None,
    blocks: Callable[[np.ndarray, gguf.GGMLQuantizationType], np.ndarray] = gguf.quantize,
) -> Path:
    """As llama.cpp's converter does it: other names, a Llama's rows of q and k in rotary pairs, Gemma's norms whole.
    `blocks` makes those of the tensors that are to be `quantized`."""
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    names = GGUF_NAMES | GEMMA_NAMES if arch == "gemma3" else GGUF_NAMES
    ropes = config.get("rope_parameters") or config
    ropes = {"full_attention": ropes} if "full_attention" not in ropes else ropes
    writer = gguf.GGUFWriter(target, arch)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
        writer.add_float32("gemma3.final_logit_softcapping", config["final_logit_softcapping"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(ropes["full_attention"]["factor"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    vocab = tokenizer["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(vocab))])
    writer.add_eos_token_id(2)
    for name, tensor in load_file(source / "model.safetensors").items():
        for heads, part in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
            if part in name and arch == "llama":
                halves = tensor.reshape(config[heads], 2, -1, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        kind = (quantized or {}).get(name)
        values = np.ascontiguousarray(tensor)
        writer.add_tensor(name, values if kind is None else blocks(values, kind), raw_dtype=kind)
    if rope_table:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_table, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("variant", [{}, {"tied": False}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_the_same_model_in_both_formats_gives_the_same_logits(tmp_path: Path, variant: dict[str, bool]) -> None:
    directory = make_tiny_model(tmp_path / "hf", **variant)
    file = to_gguf(directory, tmp_path / "model.gguf")
    prompt = [list(range(3, 60))]
    one, other = (Stepper(make_runner(path), prompt).logits([57])[0] for path in (directory, file))
    assert torch.equal(one, other)


def test_a_table_of_rope_factors_in_gguf_is_used(tmp_path: Path) -> None:
    """Eight equal factors are linear scaling, which config.json can spell too."""
    directory = make_tiny_model(tmp_path / "hf")
    scaled = make_tiny_model(tmp_path / "scaled", rope_scaling={"rope_type": "linear", "factor": 4.0})
    file = to_gguf(directory, tmp_path / "model.gguf", rope_table=[4.0] * 8)
    prompt = [list(range(3, 60))]
    one, other = (Stepper(make_runner(path), prompt).logits([57])[0] for path in (scaled, file))
    assert torch.equal(one, other)


@pytest.mark.parametrize("table", [[4.0] * 7 + [0.0], [float("nan")] * 8, [[4.0]] * 8], ids=str)
def test_a_table_that_can_not_divide_is_refused(tmp_path: Path, table: list[Any]) -> None:
    file = to_gguf(make_tiny_model(tmp_path / "hf"), tmp_path / "model.gguf", rope_table=table)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        make_runner(file)


def test_a_table_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    file = to_gguf(make_tiny_model(tmp_path / "hf"), tmp_path / "model.gguf", rope_table=[4.0] * 7)
    with pytest.raises(ModelError, match="7 numbers, expected 8"):
        make_runner(file)


def test_half_precision_checkpoints_load(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "hf")
    tensors = {name: tensor.astype(np.float16) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    _, weights = load_model(directory, torch.float32)
    assert torch.equal(weights.embedding, torch.from_numpy(tensors["model.embed_tokens.weight"]).float())


def test_shards_are_one_model_and_derived_tensors_are_ignored(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "hf")
    _, whole = load_model(directory, torch.float32)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, directory / "model-00001-of-00002.safetensors")
    rest = {n: tensors[n] for n in names[1::2]}
    rest["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save_file(rest, directory / "model-00002-of-00002.safetensors")
    _, sharded = load_model(directory, torch.float32)
    assert torch.equal(sharded.layers[1].gate_up.packed, whole.layers[1].gate_up.packed)


def change(directory: Path, edit: Callable[[Tensors], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


NORM, UP = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"
BROKEN: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "a missing norm": (lambda t: t.pop(NORM), f"lacks the tensor {NORM}"),
    "a missing piece of a fused matrix": (lambda t: t.pop(UP), f"lacks the tensor {UP}"),
    "an unexpected bias": (
        lambda t: t.update({UP.replace("weight", "bias"): np.zeros(128, np.float32)}),
        f"no place for: {UP.replace('weight', 'bias')}",
    ),
    "a layer too many": (
        lambda t: t.update({NORM.replace("1", "2"): t[NORM]}),
        f"no place for: {NORM.replace('1', '2')}",
    ),
    "an unknown tensor": (lambda t: t.update({"vision.weight": t[NORM]}), "no place for: vision.weight"),
    "a wrong shape": (lambda t: t.update({UP: t[UP][:100].copy()}), rf"{UP} has the shape \[100, 64\]"),
    "integers": (lambda t: t.update({UP: t[UP].astype(np.int32)}), "torch.int32"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, what: str) -> None:
    edit, says = BROKEN[what]
    with pytest.raises(ModelError, match=says):
        load_model(change(make_tiny_model(tmp_path / "m"), edit), torch.float32)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0{}", b"PK\3\4" + bytes(100)])
def test_a_broken_safetensors_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    model = make_tiny_model(tmp_path / "m")
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="no usable safetensors"):
        load_model(model, torch.float32)


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="no usable safetensors"):
        load_model(tmp_path / "m", torch.float32)
