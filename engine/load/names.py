"""Checkpoint names to parameter names: one vocabulary for Hugging Face and GGUF.

A parameter is `embedding`, `norm`, `head` or `<layer>.<part>`, each with `.weight` or `.bias`, with the parts
attention_norm, q, k, v, q_norm, k_norm, out, attention_post_norm, mlp_norm, gate, up, down, mlp_post_norm.

Hugging Face's post_attention_layernorm is the norm before the MLP, but in models that also have norms behind
(`has_post_norms`) it is the one behind attention.
"""

from __future__ import annotations

import re

_HF_PARTS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_POST_NORM_PARTS = _HF_PARTS | {
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_HF_TOP = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
_GGUF_PARTS = {
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output": "out",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_ffw_norm": "mlp_post_norm",
}
_GGUF_TOP = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}


def _reversed(parts: dict[str, str]) -> dict[str, str]:
    return {ours: theirs for theirs, ours in parts.items()}


_PARTS_TO_HF = {False: _reversed(_HF_PARTS), True: _reversed(_POST_NORM_PARTS)}
_TOP_TO_HF = _reversed(_HF_TOP)
_PARTS_TO_GGUF = _reversed(_GGUF_PARTS)
_TOP_TO_GGUF = _reversed(_GGUF_TOP)

_HF_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")
_GGUF_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)\.(weight|bias)")
_TOP = re.compile(r"(.+)\.(weight|bias)")
_INSIDE = re.compile(r"^(?:model\.language_model\.|language_model\.model\.)")
_BESIDE = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*")
_DERIVED = re.compile(r".*rotary_emb\.inv_freq|rope_freqs\.weight")


def from_hf(name: str, *, has_post_norms: bool = False) -> str | None:
    """The parameter name of a Hugging Face tensor; None for one we don't know."""
    name = _INSIDE.sub("model.", name).removeprefix("language_model.")
    return _translate(name, _HF_LAYER, _POST_NORM_PARTS if has_post_norms else _HF_PARTS, _HF_TOP)


def from_gguf(name: str) -> str | None:
    """The parameter name of a GGUF tensor; None for one we don't know."""
    return _translate(name, _GGUF_LAYER, _GGUF_PARTS, _GGUF_TOP)


def to_hf(name: str, *, has_post_norms: bool = False) -> str:
    """The Hugging Face tensor of a parameter."""
    *layer, part, kind = name.split(".")
    if layer:
        return f"model.layers.{layer[0]}.{_PARTS_TO_HF[has_post_norms][part]}.{kind}"
    return f"{_TOP_TO_HF[part]}.{kind}"


def spelled(name: str, *, is_gguf: bool, has_post_norms: bool = False) -> str:
    """A parameter as a checkpoint calls it; a tensor that we don't know is called so already."""
    if "." not in name:
        return name
    *layer, part, kind = name.split(".")
    parts = _PARTS_TO_GGUF if is_gguf else _PARTS_TO_HF[has_post_norms]
    tops = _TOP_TO_GGUF if is_gguf else _TOP_TO_HF
    if len(layer) == 1 and part in parts:
        return f"{'blk' if is_gguf else 'model.layers'}.{layer[0]}.{parts[part]}.{kind}"
    return f"{tops[part]}.{kind}" if not layer and part in tops else name


def is_derived(name: str) -> bool:
    """Whether a tensor only repeats what the configuration says (rotary frequencies), so that it is no weight."""
    return _DERIVED.fullmatch(name) is not None


def is_beside_text(name: str) -> bool:
    """Whether a tensor is of the part of a model that sees images."""
    return _BESIDE.fullmatch(name) is not None


def _translate(name: str, layer: re.Pattern[str], parts: dict[str, str], top: dict[str, str]) -> str | None:
    if found := layer.fullmatch(name):
        part = parts.get(found[2])
        return f"{int(found[1])}.{part}.{found[3]}" if part else None
    if found := _TOP.fullmatch(name):
        part = top.get(found[1])
        return f"{part}.{found[2]}" if part else None
    return None
