"""A tiny random Llama with its own tokenizer and chat template, made on the spot: no download, no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = (
    "The parcel was late and the customer asks for a refund. Please answer in one short sentence. "
    "You are a helpful assistant that reads tickets. Order 1234567 was shipped to Berlin on 3 May. "
    "system user assistant What is wrong with the delivery of my order? Thank you for the quick reply! "
)


def make_tiny_model(
    directory: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    mlp: int = 128,
    vocab_size: int = 384,
    context_tokens: int = 512,
    tied: bool = True,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Writes a Hugging Face directory and returns it. Same arguments, same bytes.

    The weights are drawn so that logits spread over a few units: greedy choices are rarely close calls.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": tied,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    tokens = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "chat_template": chat_template}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in tokens.items() if v}, indent=1))
    save_file(_weights(config, seed), directory / "model.safetensors")
    return directory


def make_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    def vector(size: int, mean: float) -> np.ndarray:
        return (mean + 0.1 * random.standard_normal(size)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden, scale=3.0),
        "model.norm.weight": vector(hidden, 1.0),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden, scale=3.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        for name, (rows, columns) in shapes.items():
            weights[f"{at}{name}.weight"] = matrix(rows, columns)
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                weights[f"{at}{name}.bias"] = vector(rows, 0.0)
        weights[f"{at}input_layernorm.weight"] = vector(hidden, 1.0)
        weights[f"{at}post_attention_layernorm.weight"] = vector(hidden, 1.0)
    return weights
