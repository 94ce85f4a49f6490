"""Masks: exactly the allowed tokens keep their logits, whatever the mix of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sample.masks import few_allowed, gathered, mask, packed
from engine.sample.row import SampleRow

PARAMS = SamplingParams(max_tokens=4)


def words_of(allowed: list[bool], behind: bool) -> np.ndarray:
    """As the words of a mask, with such bits behind the vocabulary."""
    bits = np.full(-(-len(allowed) // 32) * 32, behind, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


class Case(NamedTuple):
    """Rows of a step: what each may sample (None: anything) and which ids may not come now, and their logits."""

    vocab: int
    masks: list[tuple[list[bool] | None, tuple[int, ...]]]
    logits: torch.Tensor
    rows: list[SampleRow]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocab = draw(st.integers(1, 100))
    few = st.sets(st.integers(0, vocab - 1), min_size=1, max_size=3).map(lambda ids: [i in ids for i in range(vocab)])
    nearly_all = st.sets(st.integers(0, vocab - 1), max_size=3).map(lambda ids: [i not in ids for i in range(vocab)])
    any_mask = st.none() | few | nearly_all | st.lists(st.booleans(), min_size=vocab, max_size=vocab)
    ends = st.lists(st.integers(0, vocab - 1), max_size=2, unique=True).map(tuple)
    masks = draw(st.lists(st.tuples(any_mask, ends), min_size=1, max_size=5))
    behind = draw(st.booleans())
    logits = torch.arange(vocab * len(masks), dtype=torch.float32).reshape(len(masks), vocab)
    rows = [
        SampleRow(PARAMS, 9, masked_ids=ends, allowed=None if allowed is None else words_of(allowed, behind))
        for allowed, ends in masks
    ]
    return Case(vocab, masks, logits, rows)


@given(cases())
def test_what_may_come_keeps_its_logit_and_nothing_else_does(case: Case) -> None:
    vocab, masks, logits, rows = case
    found = logits.clone()
    mask(found, rows)
    bits = np.unpackbits(packed(rows, vocab).view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    for index, (allowed, ends) in enumerate(masks):
        may = np.ones(vocab, bool) if allowed is None else np.array(allowed)
        left = may.copy()
        left[list(ends)] = False
        if allowed is None or left.any():
            may = left
        expected = torch.where(torch.from_numpy(may), logits[index], float("-inf"))
        assert torch.equal(found[index], expected)
        assert np.array_equal(bits[index], may), "the head's mask says the same"


@given(cases(), st.integers(0, 6))
def test_few_tokens_are_gathered_in_their_order(case: Case, most: int) -> None:
    vocab, masks, logits, rows = case
    masked = logits.clone()
    mask(masked, rows)
    tokens = [torch.nonzero(row > float("-inf"))[:, 0].tolist() for row in masked]
    few = few_allowed(rows, vocab, most)
    assert few == {
        index: mine for index, mine in enumerate(tokens) if masks[index][0] is not None and len(mine) <= most
    }
    if few:
        found = gathered(logits, few, most + 1)
        for (index, mine), row in zip(few.items(), found, strict=True):
            assert torch.equal(row[: len(mine)], logits[index, mine])
            assert (row[len(mine) :] == float("-inf")).all()
