"""What figures say of positions, against slow definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.quality.figures import TAIL_SHARES, Positions, Quality, quality_of


def figures(kl: list[float], agrees: list[bool], reference: list[float], nll: list[float]) -> Quality:
    found = Positions(np.array(kl), np.array(agrees), np.array(reference), np.array(nll))
    return quality_of(found, weight_format="int8", kv_format="bf16", against="", is_fused=True)


POSITION = st.tuples(st.floats(0, 50), st.booleans(), st.floats(0, 20), st.floats(0, 20))


@given(st.lists(POSITION, min_size=1, max_size=300))
def test_figures_are_what_they_are_called(positions: list[tuple[float, bool, float, float]]) -> None:
    kl, agrees, reference, nll = (list(column) for column in zip(*positions, strict=True))
    found = figures(kl, agrees, reference, nll)
    size = len(kl)
    assert found.tokens == size
    assert found.kl == pytest.approx(sum(kl) / size, abs=1e-9)
    assert found.top1 == pytest.approx(sum(agrees) / size)
    assert found.reference_perplexity == pytest.approx(math.exp(sum(reference) / size))
    assert found.reference_perplexity * found.perplexity == pytest.approx(math.exp(sum(nll) / size))
    assert found.tail[-1] == max(kl)
    assert list(found.tail) == sorted(found.tail), "rarer positions have more"
    for share, most in zip(TAIL_SHARES, found.tail, strict=True):
        assert sum(value > most for value in kl) <= share * size
        assert most in kl


def test_the_error_shrinks_with_the_text() -> None:
    kl = [0.0, 1.0] * 50
    same = [False] * 100, [1.0] * 100, [1.0] * 100
    assert figures(kl, *same).kl_error == pytest.approx(0.5 / 10, rel=0.01)
    assert figures([0.2] * 100, *same).kl_error == pytest.approx(0)
    rougher = figures([0.1] * 100, [True] * 100, [1.0] * 100, [1.1, 1.3] * 50)
    assert rougher.perplexity == pytest.approx(math.exp(0.2))
    assert rougher.perplexity_error == pytest.approx(math.exp(0.2) * 0.1 / 10, rel=0.01)


def test_what_is_not_a_number_stays_so() -> None:
    found = figures([math.nan, 1.0], [True, False], [1.0, 1.0], [math.nan, 1.0])
    assert math.isnan(found.kl)
    assert math.isnan(found.perplexity)
    assert figures([0.0], [True], [1.0], [1e6]).perplexity == math.inf
    assert figures([-1e-9], [True], [1.0], [1.0]).kl == 0, "rounding leaves nothing below zero"
