"""Sampled ids follow the distribution the parameters describe, and each row's id depends on that row alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sample import sampler
from engine.sample.sampler import SampleRow, sample

CHI_SQUARE_999999 = {1: 23.9, 2: 27.6, 3: 30.7, 4: 33.4, 5: 35.9, 6: 38.3, 7: 40.5}
"""Critical values for odds of 1 in 1,000,000, by degrees of freedom."""


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 1.0, **changes})


def expected(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """The definition, by sorting everything: float64 [vocab]."""
    scaled = logits.double() / p.temperature
    order = scaled.argsort(descending=True, stable=True)
    probs = scaled.softmax(-1)[order]
    if p.top_k:
        probs[p.top_k :] = 0
        probs = probs / probs.sum()
    probs = torch.where(probs.cumsum(-1) - probs < p.top_p, probs, 0.0)
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


DISTRIBUTIONS = [
    params(),
    params(temperature=0.5),
    params(temperature=1.7, seed=9),
    params(top_k=3),
    params(top_p=0.7),
    params(top_k=5, top_p=0.8, temperature=1.3),
    params(top_p=0.01),
    params(top_k=100),
]


@pytest.mark.parametrize("narrow", [1024, 2], ids=["all candidates", "2 candidates first"])
@pytest.mark.parametrize("p", DISTRIBUTIONS)
def test_frequencies_follow_the_distribution(p: SamplingParams, narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square over 4,000 positions. The seeds are fixed, so this can't flicker; another sound random function
    would fail one of the cases with odds of 1 in 1,000,000 each."""
    monkeypatch.setattr(sampler, "NARROW", narrow)
    logits = torch.tensor([1.0, 3.0, 0.5, 2.5, 2.0, -1.0, 0.0, 1.5])
    count = 4_000
    ids = sample(logits.repeat(count, 1), [SampleRow(p, position) for position in range(count)])
    seen, want = Counter(ids), expected(logits, p)
    kept = [i for i in range(8) if want[i] > 0]
    assert set(seen) <= set(kept), "a filtered token was drawn"
    if len(kept) > 1:
        statistic = sum((seen[i] - count * float(want[i])) ** 2 / (count * float(want[i])) for i in kept)
        assert statistic < CHI_SQUARE_999999[len(kept) - 1]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.integers(2, 300))
def test_a_row_is_sampled_alone_as_in_any_batch(data: st.DataObject, vocab: int) -> None:
    count = data.draw(st.integers(1, 6))
    one = st.builds(
        params,
        temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 2, 7, 1000]),
        top_p=st.sampled_from([0.001, 0.5, 0.9, 1.0]),
        seed=st.integers(0, 2**63 - 1),
    )
    rows = [SampleRow(data.draw(one), position) for position in range(count)]
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    together = sample(logits.clone(), rows)
    assert together == [sample(logits[i : i + 1].clone(), rows[i : i + 1])[0] for i in range(count)]
    for i, row in enumerate(rows):
        if row.params.temperature > 0.1:
            assert expected(logits[i], row.params)[together[i]] > 0


def test_greedy_and_top_1_take_the_largest() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(params(temperature=0), 0), SampleRow(params(top_k=1), 1), SampleRow(params(temperature=1e-9), 2)]
    assert sample(logits.clone(), rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_has_no_id(bad: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    rows = [SampleRow(params(temperature=t, top_p=p), 0) for t, p in ((0, 1.0), (1, 1.0), (1, 0.5), (0, 1.0))]
    sound = sample(logits.clone(), rows)
    for broken in range(4):
        changed = logits.clone()
        changed[broken, 7] = bad
        assert sample(changed, rows) == [None if i == broken else token for i, token in enumerate(sound)]


def test_masked_ids_never_come() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.5]]).repeat(600, 1)
    for p in (params(temperature=0), params(), params(top_k=2), params(top_p=0.9)):
        ids = sample(logits.clone(), [SampleRow(p, position, masked_ids=(0, 1)) for position in range(600)])
        assert set(ids) <= {2, 3}


def test_choices_of_one_prompt_differ() -> None:
    logits = torch.zeros(1, 1000)
    row = SampleRow(params(), 5)
    assert sample(logits.clone(), [row]) != sample(logits.clone(), [replace(row, choice=1)])


@pytest.mark.parametrize("p", [params(temperature=0), params(), params(top_p=0.9), params(top_k=10**30, min_p=0.1)])
def test_a_row_of_which_no_token_may_come_gets_none_and_costs_the_others_nothing(p: SamplingParams) -> None:
    logits = torch.tensor([[1.0, 3.0, 0.5, 2.5]]).repeat(3, 1)
    rows = [SampleRow(p, 5), SampleRow(p, 5, masked_ids=(0, 1, 2, 3)), SampleRow(p, 5, masked_ids=(0, 2, 3))]
    first, none, only = sample(logits, rows)
    assert first is not None and none is None and only == 1


@pytest.mark.parametrize("p", [*DISTRIBUTIONS, params(temperature=0), params(min_p=0.2), params(temperature=0.001)])
def test_a_grammar_s_row_is_sampled_as_one_whose_other_logits_are_minus_infinity(p: SamplingParams) -> None:
    """Whether the grammar allows few tokens, many, one or none."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 3000, generator=generator) * 4
    keep = torch.rand(40, 3000, generator=generator) < torch.tensor([0.002, 0.9, 0.3, 0.5])[torch.arange(40) % 4, None]
    keep[4], keep[5] = False, False
    keep[5, 2999] = True
    words = np.packbits(np.pad(keep.numpy(), ((0, 0), (0, 8))), axis=1, bitorder="little").view(np.int32)
    found = sample(logits.clone(), [SampleRow(p, 7 + i, allowed=mask) for i, mask in enumerate(words)])
    sound = [i for i in range(40) if i != 4]
    rows = [SampleRow(p, 7 + i) for i in sound]
    masked = torch.where(keep, logits, float("-inf"))[sound]
    assert [found[i] for i in sound] == sampler._pick(masked, torch.ones(39, dtype=torch.bool), rows)
    assert (found[4], found[5]) == (None, 2999)
