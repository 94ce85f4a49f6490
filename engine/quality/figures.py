"""What two models' next-token distributions over the same text come to, as a few figures; no torch.

kl            mean of Σ p log(p / q), p the reference's distribution and q the format's, in nats
tail          the KL that a share of the positions exceeds, and the largest of all
top1          share of positions at which both rank the same token first
perplexity    exp(mean -log q(next token)) over the reference's, `reference_perplexity`
..._error     standard error of a mean: how much another text of this length might say otherwise
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TAIL_SHARES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0)
"""Of the positions that have a larger KL than the figure; 0 is the largest of all."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What one pair of formats costs a model. `tail` has a KL for each of TAIL_SHARES.

    `against` is the digest of the reference, `is_fused` tells the kernels: without fused ones a smaller format isn't
    faster.
    """

    weight_format: str
    kv_format: str
    against: str
    tokens: int
    kl: float
    kl_error: float
    tail: tuple[float, ...]
    top1: float
    perplexity: float
    perplexity_error: float
    reference_perplexity: float
    is_fused: bool

    def exceeded_by(self, share: float) -> float:
        """The KL that this share of positions exceeds; one of TAIL_SHARES."""
        return self.tail[TAIL_SHARES.index(share)]


@dataclass(frozen=True, slots=True)
class Positions:
    """Of every position of the text: the divergence, whether the first tokens agree, and -log of the next token."""

    kl: Floats
    agrees: NDArray[np.bool_]
    reference_nll: Floats
    nll: Floats


def quality_of(found: Positions, *, weight_format: str, kv_format: str, against: str, is_fused: bool) -> Quality:
    """The figures of at least one position."""
    kl = np.maximum(found.kl, 0.0)  # rounding may leave a little less than nothing
    size, extra = len(kl), found.nll - found.reference_nll
    perplexity = _exp(float(extra.mean()))
    ascending = np.sort(kl)
    return Quality(
        weight_format=weight_format,
        kv_format=kv_format,
        against=against,
        tokens=size,
        kl=float(kl.mean()),
        kl_error=_error(kl),
        tail=tuple(float(ascending[max(size - 1 - int(share * size), 0)]) for share in TAIL_SHARES),
        top1=float(found.agrees.mean()),
        perplexity=perplexity,
        perplexity_error=perplexity * _error(extra),
        reference_perplexity=_exp(float(found.reference_nll.mean())),
        is_fused=is_fused,
    )


def _error(values: Floats) -> float:
    """The standard error of their mean; infinite where there is only one."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _exp(value: float) -> float:
    """exp, infinite where that is too large for a float."""
    return math.exp(value) if value < 700 else math.inf if value > 0 else math.nan
