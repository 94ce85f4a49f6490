"""The config.json that says what a ModelConfig says: for models that came without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.config import GELU, ModelConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def config_json(model: ModelConfig, path: Path) -> dict[str, Any]:
    """Without the ids of tokens. Raises ModelError, which names the model's own `path`, for what it can't say."""
    family = model.family
    if family == "llama" and any(model.windows):
        family = "mistral"
    said = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.mlp,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": model.activation,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model, path),
        "max_position_embeddings": model.context_tokens,
        "tie_word_embeddings": model.is_tied,
    }
    if family == "mistral":
        said["sliding_window"] = model.windows[0]
    if family == "gemma3_text":
        return said | _gemma(model)
    return said | _biases(family, model, path)


def _biases(family: str, model: ModelConfig, path: Path) -> dict[str, Any]:
    has_all, has_mlp = model.has_qkv_bias and model.has_out_bias, model.has_mlp_bias
    can_say = {"llama": True, "qwen3": not has_mlp, "qwen2": not has_mlp, "mistral": not (has_all or has_mlp)}
    is_even = model.has_out_bias == (model.has_qkv_bias and family != "qwen2")
    if not is_even or not can_say[family]:
        raise ModelError(f"{path} has biases in projections for which a config.json of {family} has no word.")
    return {"attention_bias": has_all, "mlp_bias": has_mlp}


def _gemma(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_activation": GELU,
        "query_pre_attn_scalar": model.query_scalar or model.head_dim,
        "sliding_window": max(model.windows) or None,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in model.windows],
        "rope_local_base_freq": model.local_rope_theta,
        "final_logit_softcapping": model.logit_softcap or None,
    }


def _rope_scaling(model: ModelConfig, path: Path) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    raise ModelError(f"{path} scales its rotary positions by a table, which config.json can't say.")
