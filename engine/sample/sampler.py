"""Rows of logits to token ids.

1. Rows that hold a NaN or an infinity get no id, nor do those where no token may come: their sequence fails, the others
   go on.
2. Bias and penalties change the logits (penalties.py). Tokens that a grammar doesn't allow, and those that may not come
   yet (ends of answer before `min_tokens`), are masked. A grammar that allows nothing else than such an end has it.
   Rows of a grammar that allows few tokens go on with these alone.
3. Greedy rows take the largest logit (a runner may do that in the head, without logits).
4. Others: logits / temperature, those with at least `min_p` of the largest probability, of these the `top_k` largest,
   of these the fewest that hold `top_p` of their mass, then the inverse of their cumulative distribution at one uniform
   number keyed by (seed, choice, position, purpose).

A row's id depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sample.masks import few_allowed, gathered, mask
from engine.sample.penalties import adjust
from engine.sample.row import SampleRow, row_sums, takes_largest

__all__ = ["SampleRow", "sample"]

NARROW = 1024
"""Candidates looked at first: sorting a whole vocabulary costs 20 times more and is rarely needed."""

_LEAST = -700.0
_NO_MASS = 1e-290
"""Exponentials below the first are many times slower, so it stands for all of these; its mass counts for none."""


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    """logits [R, vocab] float32 (modified) -> one id a row; None where the row holds a NaN or an infinity, and where no
    token may come."""
    assert len(logits) == len(rows), "one SampleRow for each row of logits"
    is_finite = logits.sum(dim=-1).isfinite()
    adjust(logits, rows)
    ids: list[int | None] = [None] * len(rows)
    few = few_allowed(rows, logits.shape[-1], NARROW)
    if few:
        indices = list(few)
        narrow = gathered(logits, few, min(NARROW, logits.shape[-1]))
        for i, place in zip(indices, _pick(narrow, is_finite[indices], [rows[i] for i in indices]), strict=True):
            ids[i] = None if place is None else few[i][place]
    rest = [i for i in range(len(rows)) if i not in few]
    if rest:
        wide, mine = logits[rest] if few else logits, [rows[i] for i in rest]
        mask(wide, mine)
        for i, token in zip(rest, _pick(wide, is_finite[rest], mine), strict=True):
            ids[i] = token
    return ids


def _pick(logits: Tensor, is_finite: Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    """Steps 3 and 4, for logits of which those that may not come are -inf."""
    likeliest = logits.argmax(dim=-1, keepdim=True)
    is_sound = (is_finite & (logits.gather(1, likeliest)[:, 0] > -math.inf)).tolist()
    ids: list[int | None] = list(likeliest[:, 0].tolist())
    drawn = [i for i, row in enumerate(rows) if not takes_largest(row.params) and is_sound[i]]
    plain = [i for i in drawn if not _is_filtered(rows[i].params)]
    filtered = [i for i in drawn if _is_filtered(rows[i].params)]
    if plain:
        for i, token in zip(plain, _draw_plain(logits[plain], [rows[i] for i in plain]), strict=True):
            ids[i] = token
    if filtered:
        for i, token in zip(filtered, _draw_filtered(logits[filtered], [rows[i] for i in filtered]), strict=True):
            ids[i] = token
    return [token if sound else None for token, sound in zip(ids, is_sound, strict=True)]


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf


def _scaled(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    # the largest logit becomes 0 first: dividing by a tiny temperature must not overflow
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double()
    scaled /= temperature[:, None]
    return scaled.clamp_(min=_LEAST)


def _draw_plain(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return _invert(_scaled(logits, rows).exp_(), rows)


def _draw_filtered(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Looks at the NARROW most likely tokens, and at all of them only for the rows where these are too few."""
    width = min(NARROW, logits.shape[-1])
    scaled = _scaled(logits, rows)
    ids, is_enough = _draw_from_top(scaled, rows, width)
    wide = [i for i, enough in enumerate(is_enough) if not enough]
    if wide:
        again, _ = _draw_from_top(scaled[wide], [rows[i] for i in wide], logits.shape[-1])
        for i, token in zip(wide, again, strict=True):
            ids[i] = token
    return ids


def _draw_from_top(scaled: Tensor, rows: Sequence[SampleRow], width: int) -> tuple[list[int], list[bool]]:
    """Draws among the `width` largest of each row; and whether they held all that the row's filters keep."""
    vocab = scaled.shape[-1]
    least = torch.tensor([_log(row.params.min_p) for row in rows], dtype=torch.float64)[:, None]
    total = row_sums(scaled.exp().masked_fill_(scaled < least, 0.0))
    values, candidates = scaled.topk(width, dim=-1)
    top_k = torch.tensor([min(row.params.top_k or vocab, vocab) for row in rows])[:, None]
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64)[:, None]
    cut = (torch.arange(width)[None, :] >= top_k) | (values < least)
    mass = values.exp().masked_fill_(cut, 0.0)
    kept_mass = torch.where(top_k < vocab, row_sums(mass), total)
    before = mass.cumsum(dim=-1) - mass
    keep = before < top_p * kept_mass
    is_all = (top_k <= width) | (values[:, -1:] < least) | torch.tensor(width == vocab)
    is_enough = is_all | (~keep[:, -1:] & (top_k >= vocab))
    chosen = _invert(mass.masked_fill_(~keep, 0.0), rows)
    ids = candidates.gather(1, torch.tensor(chosen)[:, None])[:, 0].tolist()
    return ids, is_enough[:, 0].tolist()


def _invert(mass: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Index in each row of `mass` [R, n] float64 (unnormalised) where its cumulative sum passes the row's draw."""
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1:]
    draws = torch.tensor([row.draw for row in rows], dtype=torch.float64)[:, None]
    # below the total even when the product rounds up, so that a token without mass is never chosen
    targets = torch.minimum(draws * total, total.nextafter(torch.zeros_like(total))).clamp_(min=_NO_MASS)
    chosen: list[int] = torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()
    return chosen
