"""What heads compute and how far they are from the model, as plain functions of their tensors that torch can derive.

Row r of a text is what the model has after its token r, behind the last norm: of it the model makes the logits of token
r + 1. Head number k takes that row on by one token more: it is told token r + k + 1 (by its embedding), and says what
comes behind it, which is what the model itself says at row r + k + 1. So the model's own rows are the soft targets of
all heads, and nothing but rows and tokens is needed to train them.

A head adds to the row what a gated MLP makes of row and embedding, each divided by its root mean square. With `down`
zero it adds nothing: heads begin as the model's own head, asked again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, log_softmax, silu, softmax

EPS = 1e-5
DECAY = 0.8
"""Weight of each head over that of the one before: a late one counts only if those before it are right."""


def initial_parts(head: Tensor, *, num_heads: int, inner: int, seed: int) -> dict[str, Tensor]:
    """Heads that say what the model's own `head` [vocabulary, hidden] says of the row, whatever they are told."""
    hidden = head.shape[1]
    generator = torch.Generator().manual_seed(seed)
    parts = {"head": head.detach().float().clone()}
    for place in range(num_heads):
        parts[f"{place}.gate_up"] = torch.randn(2 * inner, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
        parts[f"{place}.down"] = torch.zeros(hidden, inner)
    return parts


def told(x: Tensor, embedded: Tensor) -> Tensor:
    """What a head reads: rows [R, hidden] beside the embeddings of the tokens that it is told -> [R, 2 hidden]."""
    return torch.cat((_even(x), _even(embedded)), dim=-1)


def advanced(parts: Mapping[str, Tensor], place: int, x: Tensor, embedded: Tensor, activation: str) -> Tensor:
    """Rows [R, hidden] one token on."""
    gate, up = linear(told(x, embedded), parts[f"{place}.gate_up"]).chunk(2, dim=-1)
    opened = gelu(gate, approximate="tanh") if activation == "gelu" else silu(gate)
    return x + linear(opened * up, parts[f"{place}.down"])


def heads_logits(
    parts: Mapping[str, Tensor], num_heads: int, rows: Tensor, embedded: Tensor, activation: str
) -> list[Tensor]:
    """Of consecutive rows [R, hidden], `embedded` [R, hidden] being the token that came after each: for head k the
    logits over the vocabulary at rows 0 … R - k - 2, to compare with the model's at rows k + 1 … R - 1."""
    found = []
    x = rows
    for place in range(min(num_heads, len(rows) - 1)):
        x = advanced(parts, place, x[: len(rows) - place - 1], embedded[place:-1], activation)
        found.append(linear(x, parts["head"]))
    return found


def heads_loss(
    parts: Mapping[str, Tensor],
    num_heads: int,
    rows: Tensor,
    embedded: Tensor,
    targets: Tensor,
    owners: Tensor,
    activation: str,
) -> Tensor:
    """Cross entropy of the heads against the model's own distributions, a scalar: `targets` [R, vocabulary] are its
    logits at each row, `owners` [R] name the text that a row is of. Heads never look from one text into the next."""
    total, weights = rows.new_zeros(()), 0.0
    for place, logits in enumerate(heads_logits(parts, num_heads, rows, embedded, activation)):
        is_one_text = owners[place + 1 :] == owners[: len(logits)]
        surprise = -(softmax(targets[place + 1 :], -1) * log_softmax(logits.float(), -1)).sum(-1)
        weight = DECAY**place
        total = total + weight * (surprise * is_one_text).sum() / is_one_text.sum().clamp_min(1)
        weights += weight
    return total / max(weights, 1.0)


def right_in_a_row(
    parts: Mapping[str, Tensor],
    num_heads: int,
    rows: Tensor,
    embedded: Tensor,
    columns: Tensor,
    owners: Tensor,
    activation: str,
) -> Tensor:
    """How many heads, from the first on, propose what came: int64 [R], of rows that all of them can be judged at, -1 at
    others. `columns` [R] is the place in the vocabulary of the token that came after each row, -1 outside of it."""
    counts = torch.full((len(rows),), -1)
    judged = len(rows) - num_heads
    if judged <= 0:
        return counts
    going = torch.ones(judged, dtype=torch.bool)
    right = torch.zeros(judged, dtype=torch.int64)
    for place, logits in enumerate(heads_logits(parts, num_heads, rows, embedded, activation)):
        going &= logits[:judged].argmax(-1) == columns[place + 1 : place + 1 + judged]
        right += going
    is_one_text = owners[num_heads:] == owners[:judged]
    counts[:judged] = torch.where(is_one_text, right, -1)
    return counts


def _even(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
