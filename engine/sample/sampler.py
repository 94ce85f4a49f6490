"""Rows of logits to token ids.

1. Rows that hold a NaN or an infinity get no id: their sequence fails, the others go on.
2. Tokens that may not come yet (ends of answer before `min_tokens`) are masked.
3. Greedy rows take the largest logit (a runner may do that in the head, without logits).
4. Others: logits / temperature, the `top_k` largest, of these the fewest that hold `top_p` of their mass, then the
   inverse of their cumulative distribution at one uniform number keyed by (seed, choice, position, purpose).

A row's id depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sample.random import Purpose, uniform

NARROW = 1024
"""Candidates looked at first: sorting a whole vocabulary costs 20 times more and is rarely needed."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row is sampled. `position` is the absolute position of the token; `masked_ids` may not come."""

    params: SamplingParams
    position: int
    choice: int = 0
    masked_ids: tuple[int, ...] = ()

    @property
    def is_argmax(self) -> bool:
        """Whether its id is that of the largest logit, and nothing else of the logits counts."""
        return not self.masked_ids and _is_argmax(self.params)

    @property
    def draw(self) -> float:
        return uniform(self.params.seed, self.choice, self.position, Purpose.SAMPLE)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int | None]:
    """logits [R, vocab] float32 (modified) -> one id a row; None where the row holds a NaN or an infinity."""
    assert len(logits) == len(rows), "one SampleRow for each row of logits"
    is_sound = logits.sum(dim=-1).isfinite().tolist()
    for index, row in enumerate(rows):
        if row.masked_ids:
            logits[index, list(row.masked_ids)] = float("-inf")
    ids: list[int | None] = list(logits.argmax(dim=-1).tolist())
    drawn = [i for i, row in enumerate(rows) if not _is_argmax(row.params) and is_sound[i]]
    plain = [i for i in drawn if not _is_filtered(rows[i].params)]
    filtered = [i for i in drawn if _is_filtered(rows[i].params)]
    if plain:
        for i, token in zip(plain, _draw_plain(logits[plain], [rows[i] for i in plain]), strict=True):
            ids[i] = token
    if filtered:
        for i, token in zip(filtered, _draw_filtered(logits[filtered], [rows[i] for i in filtered]), strict=True):
            ids[i] = token
    return [token if sound else None for token, sound in zip(ids, is_sound, strict=True)]


def _is_argmax(params: SamplingParams) -> bool:
    return params.is_greedy or params.top_k == 1


def _is_filtered(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0


def _scaled(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    # the largest logit becomes 0 first: dividing by a tiny temperature must not overflow
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    return (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature[:, None]


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
    total = scaled.exp().sum(dim=-1, keepdim=True)
    values, candidates = scaled.topk(width, dim=-1)
    top_k = torch.tensor([row.params.top_k or vocab for row in rows])[:, None]
    top_p = torch.tensor([row.params.top_p for row in rows], dtype=torch.float64)[:, None]
    mass = values.exp().masked_fill_(torch.arange(width)[None, :] >= top_k, 0.0)
    kept_mass = torch.where(top_k < vocab, mass.sum(dim=-1, keepdim=True), total)
    before = mass.cumsum(dim=-1) - mass
    keep = before < top_p * kept_mass
    is_enough = (top_k <= width) | ~keep[:, -1:] | torch.tensor(width == vocab)
    chosen = _invert(mass.masked_fill_(~keep, 0.0), rows)
    ids = candidates.gather(1, torch.tensor(chosen)[:, None])[:, 0].tolist()
    return ids, is_enough[:, 0].tolist()


def _invert(mass: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Index in each row of `mass` [R, n] float64 (unnormalised) where its cumulative sum passes the row's draw."""
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1:]
    draws = torch.tensor([row.draw for row in rows], dtype=torch.float64)[:, None]
    # below the total even when the product rounds up, so that a token without mass is never chosen
    targets = torch.minimum(draws * total, total.nextafter(torch.zeros_like(total)))
    chosen: list[int] = torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()
    return chosen
