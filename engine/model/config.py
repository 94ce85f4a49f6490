"""The shape of a Llama-family decoder, from a Hugging Face config.json or from GGUF metadata; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.load.fields import Fields
from engine.load.meta import check_family, read_json
from engine.memory.shape import ModelShape, decoder_shape


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
    """One vocabulary for the shapes of all sources. `head_dim` is per head; `mlp` the width of gate and up."""

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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads can't share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 2:
            raise ModelError(f"A head of {self.head_dim} dimensions can't be rotated in pairs.")

    @property
    def shape(self) -> ModelShape:
        """What of it takes memory."""
        return decoder_shape(
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
        )

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices, biases and norms; a tied head counts once."""
        return self.shape.num_parameters


def config_from_directory(path: Path) -> ModelConfig:
    """Reads config.json. Raises ModelError naming what is missing or not supported."""
    source = Fields(read_json(path / "config.json"), path)
    check_family(source.values.get("model_type"), path)
    if source.values.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path} uses the activation {source.values['hidden_act']!r}; only silu is supported.")
    heads, hidden = source.count("num_attention_heads"), source.count("hidden_size")
    # transformers 5 writes rope_parameters; older files have rope_theta beside rope_scaling
    rope = source.nested("rope_parameters") or source.nested("rope_scaling") or {}
    theta = Fields(rope, path).number("rope_theta", default=source.number("rope_theta", default=10000.0))
    has_attention_bias = source.flag("attention_bias")
    return ModelConfig(
        vocab_size=source.count("vocab_size"),
        hidden=hidden,
        mlp=source.count("intermediate_size"),
        num_layers=source.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=source.count("num_key_value_heads", default=heads),
        head_dim=source.count("head_dim", default=hidden // heads),
        context_tokens=source.count("max_position_embeddings"),
        norm_eps=source.number("rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=_scaling_of(rope, source),
        is_tied=source.flag("tie_word_embeddings"),
        has_qkv_bias=has_attention_bias,
        has_out_bias=has_attention_bias,
        has_mlp_bias=source.flag("mlp_bias"),
    )


def config_from_gguf(
    fields: dict[str, Any], tensors: dict[str, Any], path: Path, rope_table: tuple[float, ...]
) -> ModelConfig:
    """Reads GGUF metadata; which biases there are and whether the head is tied shows in the names of `tensors`.

    `rope_table` holds the numbers of rope_freqs.weight, or nothing.
    """
    arch = check_family(fields.get("general.architecture"), path)
    source = Fields({key.removeprefix(f"{arch}."): value for key, value in fields.items()}, path)
    experts = source.values.get("expert_count", 0)
    if not isinstance(experts, int) or experts:
        raise ModelError(f"{path} is a mixture of experts, which is not supported.")
    heads, hidden = source.count("attention.head_count"), source.count("embedding_length")
    head_dim = source.count("attention.key_length", default=hidden // heads)
    if source.count("rope.dimension_count", default=head_dim) != head_dim:
        raise ModelError(f"{path} rotates only a part of each head, which is not supported.")
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path} has no tensor token_embd.weight.")
    return ModelConfig(
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden=hidden,
        mlp=source.count("feed_forward_length"),
        num_layers=source.count("block_count"),
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
