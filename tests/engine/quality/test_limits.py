"""Limits are those that were agreed, and verdicts follow from figures alone."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.load.quantization import Quantization
from engine.quality.limits import Limit, Part, Verdict, Word, kv_limit, weight_limit, worst
from tests.engine.quality.made import made_quality

FOUR = Quantization(layout="gptq", bits=4)
FP8 = Quantization(layout="scaled", bits=8, is_float=True)


@pytest.mark.parametrize(
    ("weights", "stored", "limit"),
    [
        ("float32", None, None),
        ("bf16", None, None),
        ("int8", None, Limit(0.01, 1.01)),
        ("fp8", None, Limit(0.02, 1.01)),
        ("w8a16", Quantization(layout="gptq", bits=8), Limit(0.01, 1.01)),
        ("w4a16", FOUR, Limit(0.05, 1.04)),
        ("bf16", FOUR, Limit(0.05, 1.04)),  # floats that were made of 4 bits are still 4 bits
        ("int8", FOUR, Limit(0.05, 1.04)),
        ("bf16", FP8, Limit(0.02, 1.01)),
        ("int8", Quantization(layout="scaled", bits=8), Limit(0.01, 1.01)),
        ("fp8", FP8, Limit(0.02, 1.01)),
    ],
)
def test_limits_of_weights(weights: str, stored: Quantization | None, limit: Limit | None) -> None:
    assert weight_limit(weights, stored) == limit


def test_limits_of_kv() -> None:
    limits = {"float32": None, "bf16": None, "int8": Limit(0.005, 1.005), "fp8": Limit(0.02, 1.01)}
    assert {kv: kv_limit(kv) for kv in limits} == limits


AN_EDGE = [
    ({"kl": 0.01, "perplexity": 1.01}, Word.WITHIN),
    ({"kl": 0.010001}, Word.OVER),
    ({"perplexity": 1.010001}, Word.OVER),
    ({"perplexity": 0.5}, Word.WITHIN),
    ({"kl": math.nan}, Word.OVER),
    ({"perplexity": math.inf}, Word.OVER),
]


@pytest.mark.parametrize(("figures", "word"), AN_EDGE)
def test_both_figures_must_hold(figures: dict[str, float], word: Word) -> None:
    part = Part(format="int8", limit=weight_limit("int8", None), quality=made_quality(**figures))
    assert part.word is word


def test_what_has_no_limit_or_no_figures() -> None:
    assert Part(format="bf16", limit=None, quality=made_quality(kl=9.0)).word is Word.UNQUANTIZED
    assert Part(format="int8", limit=kv_limit("int8")).word is Word.UNMEASURED


@given(st.lists(st.sampled_from(Word), min_size=1), st.sampled_from(Word))
def test_the_worst_is_one_of_them_and_none_makes_it_better(words: list[Word], other: Word) -> None:
    order = [Word.UNQUANTIZED, Word.WITHIN, Word.UNMEASURED, Word.OVER]
    assert order.index(worst(*words)) == max(map(order.index, words))
    assert order.index(worst(*words, other)) >= order.index(worst(*words))


def test_a_verdict_is_shown_as_json_that_any_database_takes() -> None:
    bad = made_quality(kl=math.nan, perplexity=math.inf)
    verdict = Verdict(
        weights=Part(format="int8", limit=weight_limit("int8", None), quality=bad), kv=Part(format="bf16", limit=None)
    )
    shown = json.loads(json.dumps(verdict.shown(), allow_nan=False))
    assert shown["verdict"] == shown["weights"]["verdict"] == "over"
    assert shown["weights"]["limit"] == {"kl": 0.01, "perplexity": 1.01}
    assert shown["weights"]["kl"] is None
    assert shown["kv"] == {
        "format": "bf16",
        "verdict": "unquantized",
        "kl": None,
        "top1": None,
        "perplexity_ratio": None,
        "limit": None,
    }
