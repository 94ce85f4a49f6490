"""Bias, penalties, min_p and logprobs are what their definitions say, row by row, whatever else is in the batch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.request import SamplingParams
from engine.sample import sampler
from engine.sample.logprobs import Likelihoods
from engine.sample.penalties import adjust
from engine.sample.sampler import SampleRow, sample

VOCAB = 40


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 1.0, **changes})


tokens = st.integers(0, VOCAB - 1)
extras = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 2.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4).map(lambda bias: tuple(bias.items())),
    logprobs=st.sampled_from([None, 0, 1, 20]),
    seed=st.integers(0, 5),
)
rows = st.builds(
    lambda p, history, num_prompt, position: SampleRow(
        p, position, history=tuple(history), num_prompt_tokens=min(num_prompt, len(history))
    ),
    extras,
    st.lists(tokens, max_size=12),
    st.integers(0, 12),
    st.integers(0, 99),
)


def logits_of(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(logits: NDArray[np.float32], row: SampleRow) -> NDArray[np.float64]:
    """The definition, token by token."""
    out, p = logits.astype(np.float64).copy(), row.params
    output = row.history[row.num_prompt_tokens :]
    for token, bias in p.logit_bias:
        out[token] += bias
    for token in set(row.history):
        out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        out[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
    return out


@settings(max_examples=80, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_logits_are_changed_as_defined(batch: list[SampleRow], seed: int) -> None:
    logits = logits_of(len(batch), seed)
    want = [adjusted(logits[i].numpy(), row) for i, row in enumerate(batch)]
    adjust(logits, batch)
    np.testing.assert_allclose(logits.numpy(), np.stack(want), rtol=1e-5, atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_row_depends_on_itself_alone(batch: list[SampleRow], seed: int) -> None:
    logits = logits_of(len(batch), seed)

    def run(some: slice) -> tuple[list[int | None], list[object]]:
        mine, part = logits[some].clone(), batch[some]
        likelihoods = Likelihoods(mine, part)
        ids = sample(mine, part)
        found = likelihoods.of(ids)
        return ids, [found.get(i) for i in range(len(part))]

    together = run(slice(None))
    alone = [run(slice(i, i + 1)) for i in range(len(batch))]
    assert together == ([one[0][0] for one in alone], [one[1][0] for one in alone]), "bit for bit"


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_logprobs_are_those_of_the_models_own_distribution(batch: list[SampleRow], seed: int) -> None:
    logits = logits_of(len(batch), seed)
    want = logits.double().log_softmax(-1)
    likelihoods = Likelihoods(logits, batch)
    ids = sample(logits, batch)
    found = likelihoods.of(ids)
    assert set(found) == {i for i, row in enumerate(batch) if row.params.logprobs is not None}
    for i, one in found.items():
        assert one.token_id == ids[i]
        assert one.logprob == pytest.approx(float(want[i, one.token_id]), abs=1e-9)
        best = want[i].sort(descending=True)
        count = batch[i].params.logprobs
        assert [token for token, _ in one.top] == best.indices[:count].tolist()
        assert [logprob for _, logprob in one.top] == pytest.approx(best.values[:count].tolist(), abs=1e-9)
        assert all(map(math.isfinite, [one.logprob, *(logprob for _, logprob in one.top)]))


@pytest.mark.parametrize("narrow", [1024, 2], ids=["all candidates", "2 candidates first"])
@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 0.3, "top_k": 2}, {0, 1}),
        ({"min_p": 0.3, "temperature": 2.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.3, "top_p": 0.6}, {0, 1}),
        ({"top_k": 4, "top_p": 0.85}, {0, 1, 2}),
        ({"min_p": 0.3, "presence_penalty": 2.0}, {1, 2, 3}),
    ],
)
def test_exactly_these_may_come(
    changes: dict[str, float], kept: set[int], narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "NARROW", narrow)
    logits = torch.tensor([0.0, -0.5, -1.0, -1.5, -2.0, -9.0]).repeat(800, 1)
    p = params(**changes)
    ids = sample(logits, [SampleRow(p, position, history=(5, 0), num_prompt_tokens=1) for position in range(800)])
    assert set(ids) == kept


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.5]]).repeat(200, 1)
    forced = [SampleRow(params(logit_bias=((3, 100.0),)), position) for position in range(200)]
    assert set(sample(logits.clone(), forced)) == {3}
    banned = [SampleRow(params(logit_bias=((0, -100.0), (1, -100.0))), position) for position in range(200)]
    assert set(sample(logits.clone(), banned)) == {2, 3}


def test_greedy_rows_take_the_largest_after_penalties_and_only_plain_ones_are_found_in_the_head() -> None:
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    row = SampleRow(params(temperature=0, frequency_penalty=0.2), 3, history=(1, 0), num_prompt_tokens=1)
    assert sample(logits.clone(), [row]) == [1]
    assert not row.is_argmax
    plain = replace(row, params=params(temperature=0))
    assert plain.is_argmax and sample(logits.clone(), [plain]) == [0]
    assert not replace(row, params=params(temperature=0, logprobs=0)).is_argmax
    assert not replace(row, params=params(temperature=0, logit_bias=((0, 1.0),))).is_argmax
