"""What a teacher says of the next token in a few numbers a position, from which any sum over the vocabulary follows.

Kept are the likeliest tokens, each with weight 1, and tokens drawn from the rest by a proposal r, each with weight
1 / (m r) for m draws. So for any function f of a token, the weighted sum of f over what is kept has the sum of f over
the whole vocabulary as its mean: of p log(p / q) as of q log(q / p), and of their gradients. The likeliest tokens alone
would be biased: a student trained on them puts the mass of all others onto them.

The proposal is mostly the teacher's own distribution of the rest, which keeps sums weighted by p quiet, and to a share
uniform, which bounds the weights of sums weighted by q.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

UNIFORM_SHARE = 1 / 8


class Targets(NamedTuple):
    """Of R positions, C tokens each. `entropy` is the teacher's, in nats, over its whole vocabulary."""

    ids: Tensor  # int64 [R, C]
    log_p: Tensor  # float32 [R, C]
    weights: Tensor  # float32 [R, C]
    entropy: Tensor  # float32 [R]

    def rows(self, start: int, end: int) -> Targets:
        return Targets(*(part[start:end] for part in self))


def joined(parts: list[Targets]) -> Targets:
    """The positions of all, in order."""
    return Targets(*(torch.cat(found) for found in zip(*parts, strict=True)))


def proposal(log_p: Tensor, top_ids: Tensor) -> Tensor:
    """With which probability each token is drawn, float64 [R, V]: 0 for the likeliest, `top_ids` [R, K], K < V."""
    rest = log_p.double().exp().scatter_(1, top_ids, 0.0)
    mass = rest.sum(-1, keepdim=True)
    uniform = torch.full_like(rest, 1 / (log_p.shape[1] - top_ids.shape[1])).scatter_(1, top_ids, 0.0)
    share = torch.where(mass > 1e-12, UNIFORM_SHARE, 1.0)
    return (1 - share) * rest / mass.clamp_min(1e-12) + share * uniform


def draw(logits: Tensor, *, top: int, tail: int, temperature: float, seed: int) -> Targets:
    """The targets of positions with these logits [R, V], at this temperature: `top` likeliest tokens and `tail` drawn
    ones. The same seed draws the same."""
    log_p = (logits.float() / temperature).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    top_log_p, top_ids = log_p.topk(min(top, log_p.shape[1]), dim=-1)
    weights = torch.ones_like(top_log_p)
    if top_ids.shape[1] == log_p.shape[1] or tail == 0:
        return Targets(top_ids, top_log_p, weights, entropy)
    chances = proposal(log_p, top_ids)
    drawn = torch.multinomial(chances, tail, replacement=True, generator=torch.Generator().manual_seed(seed))
    drawn_weights = (1 / (tail * chances.gather(1, drawn))).float()
    return Targets(
        torch.cat((top_ids, drawn), 1),
        torch.cat((top_log_p, log_p.gather(1, drawn)), 1),
        torch.cat((weights, drawn_weights), 1),
        entropy,
    )


def within(targets: Targets, columns: Tensor) -> Targets:
    """The same for a student whose head has other columns: `columns` int64 [V] of each token, -1 for those that it
    can't say, which then count for nothing."""
    ids = columns[targets.ids]
    return targets._replace(ids=ids.clamp_min(0), weights=targets.weights.masked_fill(ids < 0, 0.0))
