"""The shape of a decoder of any of our families, from a Hugging Face config.json or from GGUF metadata; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.load.families import (
    MOST_LAYERS,
    biases_of,
    fields_of_config,
    fields_of_gguf,
    gguf_windows,
    is_tied,
    norm_shift,
    windows_of,
)
from engine.load.fields import Fields
from engine.load.meta import read_json
from engine.memory.shape import ModelShape, decoder_shape

GELU = "gelu_pytorch_tanh"
_LOCAL_THETA = 10000.0
_GEMMA_27B_LAYERS = 62  # only this size divides scores by another root than that of its heads


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    `kind` "linear" divides all by `factor`; "llama3" divides the slow ones by `factor`, keeps the fast ones and blends
    between; "table" divides each by its own number (a GGUF file's tensor rope_freqs.weight).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    table: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One vocabulary for the shapes of all sources. What a Llama hasn't is off unless it is given.

    `head_dim`          of each head, whatever `hidden` is
    `mlp`               the width of gate and up
    `activation`        of the gate: "silu", or "gelu" in its approximation by tanh
    `windows`           tokens that each layer looks back, its own included, 0 for all; empty: all in all layers
    `local_rope_theta`  of layers with a window, whose positions are never scaled; None: as in the others
    `query_scalar`      scores are divided by its root; None: by that of `head_dim`
    `has_qk_norm`       queries and keys are normalized head by head before they are turned
    `has_post_norms`    what attention and MLP give is normalized before it is added
    `norm_shift`        what this checkpoint has left out of the weights of its norms
    `embedding_scale`   what embeddings are multiplied by, though not where they are the head
    `logit_softcap`     logits are bent to stay below it; 0: they aren't
    """

    family: str = "llama"
    vocab_size: int
    hidden: int
    mlp: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    activation: str = "silu"
    windows: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    query_scalar: float | None = None
    has_qk_norm: bool = False
    has_post_norms: bool = False
    norm_shift: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads can't share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 2:
            raise ModelError(f"A head of {self.head_dim} dimensions can't be rotated in pairs.")

    @property
    def shape(self) -> ModelShape:
        """What of it takes memory."""
        return decoder_shape(
            family=self.family,
            vocab_size=self.vocab_size,
            hidden=self.hidden,
            mlp=self.mlp,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            context_tokens=self.context_tokens,
            is_tied=self.is_tied,
            has_qkv_bias=self.has_qkv_bias,
            has_out_bias=self.has_out_bias,
            has_mlp_bias=self.has_mlp_bias,
            has_qk_norm=self.has_qk_norm,
            norms_per_layer=4 if self.has_post_norms else 2,
            windows=self.windows,
        )

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return 1 / math.sqrt(self.query_scalar or self.head_dim)

    def window_of(self, layer: int) -> int:
        """Tokens that a layer looks back; 0 for all."""
        return self.windows[layer] if self.windows else 0

    @property
    def distinct_windows(self) -> tuple[int, ...]:
        """Those that a step has to be planned for."""
        return tuple(sorted(set(self.windows))) or (0,)

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices, biases and norms; a tied head counts once."""
        return self.shape.num_parameters


def config_from_directory(path: Path) -> ModelConfig:
    """Reads config.json. Raises ModelError naming what is missing or not supported."""
    family, source = fields_of_config(read_json(path / "config.json"), path)
    layers = source.count("num_hidden_layers", most=MOST_LAYERS)
    heads, hidden = source.count("num_attention_heads"), source.count("hidden_size")
    rope, local = _ropes(source)
    biases = biases_of(source, family)
    config = ModelConfig(
        family=family,
        vocab_size=source.count("vocab_size"),
        hidden=hidden,
        mlp=source.count("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=source.count("num_key_value_heads", default=heads),
        head_dim=source.count("head_dim", default=hidden // heads),
        context_tokens=source.count("max_position_embeddings"),
        norm_eps=source.number("rms_norm_eps", default=1e-6),
        rope_theta=_theta(rope, source, default=1e6 if family == "gemma3_text" else 10000.0),
        rope_scaling=_scaling_of(rope, source),
        is_tied=is_tied(source, family),
        has_qkv_bias=biases.qkv,
        has_out_bias=biases.out,
        has_mlp_bias=biases.mlp,
        windows=windows_of(source, family, layers),
        has_qk_norm=family in ("qwen3", "gemma3_text"),
    )
    if family == "gemma3_text":
        return _gemma(config, source, local)
    if source.text("hidden_act", default="silu") != "silu":
        raise ModelError(f"{path} uses the activation {source.values['hidden_act']!r}; only silu is supported.")
    return config


def config_from_gguf(
    fields: dict[str, Any], tensors: dict[str, Any], path: Path, rope_table: tuple[float, ...]
) -> ModelConfig:
    """Reads GGUF metadata; which biases there are and whether the head is tied shows in the names of `tensors`.

    `rope_table` holds the numbers of rope_freqs.weight, or nothing.
    """
    family, source = fields_of_gguf(fields, path)
    experts = source.values.get("expert_count", 0)
    if not isinstance(experts, int) or experts:
        raise ModelError(f"{path} is a mixture of experts, which is not supported.")
    heads, hidden = source.count("attention.head_count"), source.count("embedding_length")
    head_dim = source.count("attention.key_length", default=hidden // heads)
    if source.count("rope.dimension_count", default=head_dim) != head_dim:
        raise ModelError(f"{path} rotates only a part of each head, which is not supported.")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} has no tensor token_embd.weight.")
    layers = source.count("block_count", most=MOST_LAYERS)
    config = ModelConfig(
        family="gemma3_text" if family == "gemma3" else family,
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        mlp=source.count("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=source.count("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        context_tokens=source.count("context_length"),
        norm_eps=source.number("attention.layer_norm_rms_epsilon", default=1e-6),
        rope_theta=source.number("rope.freq_base", default=10000.0),
        rope_scaling=_gguf_scaling(source, rope_table),
        is_tied="output.weight" not in tensors,
        has_qkv_bias="blk.0.attn_q.bias" in tensors,
        has_out_bias="blk.0.attn_output.bias" in tensors,
        has_mlp_bias="blk.0.ffn_down.bias" in tensors,
        windows=gguf_windows(source, family, layers),
        has_qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    return config if family != "gemma3" else _gguf_gemma(config, source)


def _ropes(source: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a config.json says of rotary positions: in most layers, and in layers with a window where it tells.

    transformers 5 writes rope_parameters, one or one for each kind of layer; older files have rope_theta beside
    rope_scaling, and perhaps rope_local_base_freq.
    """
    given = source.nested("rope_parameters") or {}
    kinds = Fields(given, source.path)
    if "full_attention" in given or "sliding_attention" in given:
        whole, local = kinds.nested("full_attention") or {}, kinds.nested("sliding_attention") or {}
    else:
        whole, local = given or source.nested("rope_scaling") or {}, {}
    return whole, {"rope_theta": source.values.get("rope_local_base_freq"), **local}


def _theta(rope: dict[str, Any], source: Fields, *, default: float) -> float:
    return Fields(rope, source.path).number("rope_theta", default=source.number("rope_theta", default=default))


def _gemma(config: ModelConfig, source: Fields, local: dict[str, Any]) -> ModelConfig:
    """What only Gemma 3 has."""
    activation = source.text("hidden_activation", default=GELU)
    if activation != GELU:
        raise ModelError(f"{source.path} uses the activation {activation!r}; Gemma's {GELU} is supported.")
    if source.flag("use_bidirectional_attention"):
        raise ModelError(f"{source.path} attends in both directions, which is not supported.")
    if source.values.get("attn_logit_softcapping") is not None:
        raise ModelError(f"{source.path} bends scores of attention (attn_logit_softcapping), which is not supported.")
    if local.get("rope_type", "default") != "default":
        raise ModelError(f"{source.path} scales the rotary positions of its windows, which is not supported.")
    has_cap = source.values.get("final_logit_softcapping") is not None
    return replace(
        config,
        activation="gelu",
        local_rope_theta=Fields(local, source.path).number("rope_theta", default=_LOCAL_THETA),
        query_scalar=source.number("query_pre_attn_scalar", default=256),
        has_post_norms=True,
        norm_shift=norm_shift(config.family),
        embedding_scale=config.hidden**0.5,
        logit_softcap=source.number("final_logit_softcapping", default=0) if has_cap else 0.0,
    )


def _gguf_gemma(config: ModelConfig, source: Fields) -> ModelConfig:
    """Likewise; norms are stored whole, and the scalar of queries isn't stored at all."""
    has_cap = "final_logit_softcapping" in source.values
    return replace(
        config,
        activation="gelu",
        local_rope_theta=source.number("rope.freq_base_swa", default=_LOCAL_THETA),
        query_scalar=config.hidden / config.num_heads if config.num_layers == _GEMMA_27B_LAYERS else None,
        has_post_norms=True,
        embedding_scale=config.hidden**0.5,
        logit_softcap=source.number("final_logit_softcapping", default=0) if has_cap else 0.0,
    )


def _scaling_of(rope: dict[str, Any], source: Fields) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    # "dynamic" stretches only positions past max_position_embeddings, which we never serve
    if kind in ("default", "dynamic"):
        return None
    fields = Fields(rope, source.path)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number("factor", default=1.0))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=fields.number("factor", default=1.0),
            low_freq_factor=fields.number("low_freq_factor", default=1.0),
            high_freq_factor=fields.number("high_freq_factor", default=4.0),
            original_context_tokens=fields.count("original_max_position_embeddings", default=8192),
        )
    raise ModelError(f"{source.path} scales its rotary positions by {kind!r}; supported: linear, llama3, dynamic.")


def _gguf_scaling(source: Fields, rope_table: tuple[float, ...]) -> RopeScaling | None:
    if rope_table:
        return RopeScaling(kind="table", table=rope_table)
    kind = source.text("rope.scaling.type", default="none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=source.number("rope.scaling.factor", default=1.0))
    raise ModelError(
        f"{source.path} scales its rotary positions by {kind!r}; supported in GGUF: linear and frequency tables."
    )
