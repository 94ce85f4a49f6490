"""Tiny random models of the families beyond Llama, written to disk as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny import CHAT_TEMPLATE, SPECIALS, make_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 24
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


def mistral(**changes: Any) -> transformers.MistralConfig:
    return transformers.MistralConfig(**SMALL | {"sliding_window": WINDOW} | changes)


def qwen2(**changes: Any) -> transformers.Qwen2Config:
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return transformers.Qwen2Config(**SMALL | windows | changes)


def qwen3(**changes: Any) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(**SMALL | {"head_dim": 32} | changes)


def gemma3(**changes: Any) -> transformers.Gemma3TextConfig:
    """Of five layers the third sees the whole context; every number that a Gemma may choose is another than usual."""
    own = {"num_hidden_layers": 5, "head_dim": 32, "sliding_window": WINDOW, "sliding_window_pattern": 3}
    own |= {"query_pre_attn_scalar": 40, "final_logit_softcapping": 12.0, "rope_parameters": GEMMA_ROPES}
    return transformers.Gemma3TextConfig(**SMALL | own | changes)


def make_family(directory: Path, config: Any, *, seed: int = 0) -> Path:
    """Writes a model of that configuration and returns its directory; logits spread over a few units."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        if parameter.dim() == 1:
            is_whole = name.endswith("norm.weight") and config.model_type != "gemma3_text"
            noise = 0.1 * noise + is_whole
        else:
            noise *= (3.0 if "embed" in name or "head" in name else 1.0) / parameter.shape[1] ** 0.5
        parameter.data.copy_(noise)
    model.save_pretrained(directory)
    make_tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))
    tokens = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))
    return directory
