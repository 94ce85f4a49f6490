"""The decoder of all families as a plain function of its parameters, which torch can derive.

The engine's own forward pass (engine/model/decoder.py) writes into a paged cache and packs its matrices; this one does
the same arithmetic over the rows of a pack, in float32, or with matrices multiplied in bf16 under torch.autocast.
`parameters` are by the names of engine/load/names.py, norms as they multiply.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from engine.distill.pack import Pack
from engine.model.config import ModelConfig
from engine.model.rope import Angles, Rope, Turns

Parameters = Mapping[str, Tensor]


def hidden(config: ModelConfig, parameters: Parameters, pack: Pack) -> Tensor:
    """The rows of a pack behind the last layer, before the last norm: float32 [T, hidden]."""
    x = parameters["embedding.weight"][pack.token_ids] * config.embedding_scale
    angles = Rope(config).angles(pack.positions)
    masks = {window: pack.mask(window) for window in config.distinct_windows}
    for index in range(config.num_layers):
        x = _layer(config, parameters, index, x, angles, masks)
    return x


def logits(config: ModelConfig, parameters: Parameters, rows: Tensor, head: Tensor | None = None) -> Tensor:
    """Of rows [R, hidden] as `hidden` gives them -> float32 [R, V]. `head` [V, hidden] in place of the model's own."""
    if head is None:
        head = parameters["embedding.weight" if config.is_tied else "head.weight"]
    found = linear(_norm(config, rows, parameters["norm.weight"]), head).float()
    cap = config.logit_softcap
    return cap * torch.tanh(found / cap) if cap else found


def _layer(
    config: ModelConfig, parameters: Parameters, index: int, x: Tensor, angles: Angles, masks: Mapping[int, Tensor]
) -> Tensor:
    at, window = f"{index}.", config.window_of(index)

    def normed(value: Tensor, name: str) -> Tensor:
        return _norm(config, value, parameters[f"{at}{name}.weight"])

    def projected(value: Tensor, name: str) -> Tensor:
        return linear(value, parameters[f"{at}{name}.weight"], parameters.get(f"{at}{name}.bias"))

    read = normed(x, "attention_norm")
    q, k, v = (
        projected(read, name).view(len(x), -1, config.head_dim).float() for name in ("q", "k", "v")
    )  # [T, heads, head_dim]
    if config.has_qk_norm:
        q, k = normed(q, "q_norm"), normed(k, "k_norm")
    turns = angles.of(window)
    mixed = _attended(config, _turned(q, turns), _turned(k, turns), v, masks[window])
    added = projected(mixed, "out").float()
    x = x + (normed(added, "attention_post_norm") if config.has_post_norms else added)
    read = normed(x, "mlp_norm")
    gate = projected(read, "gate")
    opened = gelu(gate, approximate="tanh") if config.activation == "gelu" else silu(gate)
    added = projected(opened * projected(read, "up"), "down").float()
    return x + (normed(added, "mlp_post_norm") if config.has_post_norms else added)


def _attended(config: ModelConfig, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [T, heads, head_dim], k and v [T, kv heads, head_dim] -> [T, heads * head_dim]."""
    group = config.num_heads // config.num_kv_heads
    k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    mixed = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=config.score_scale)
    return mixed[0].transpose(0, 1).reshape(mask.shape[0], -1)


def _norm(config: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * weight


def _turned(x: Tensor, turns: Turns) -> Tensor:
    """Rotates the halves of each head: x [T, heads, head_dim]."""
    cos, sin = turns.cos[:, None], turns.sin[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
