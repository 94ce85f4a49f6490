"""When a split pays: never on equal cards, sometimes on different ones, and the costs behind it add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.memory.cards import CARDS, find_card
from engine.memory.formats import kv_format, weight_format
from engine.memory.shape import ModelShape, decoder_shape
from engine.memory.sizing import Workload, sequence_parts
from engine.split.pays import LINK_BYTES_PER_S, Mix, best_two_pools, one_pool, two_pools

SMALL = decoder_shape(
    vocab_size=49_152, hidden=576, mlp=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    context_tokens=8192, is_tied=True,
)  # fmt: skip
LARGE = decoder_shape(
    vocab_size=128_256, hidden=8192, mlp=28_672, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128,
    context_tokens=131_072,
)  # fmt: skip
BF16 = Workload(context_tokens=1, concurrency=1, weights=weight_format("bf16"), kv=kv_format("bf16"))
mixes = st.builds(
    lambda prompt, cached, output: Mix(
        prompt_tokens=prompt, cached_tokens=prompt * cached // 100, output_tokens=output
    ),
    st.integers(1, 6000),
    st.integers(0, 99),
    st.integers(1, 2000),
)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([SMALL, LARGE]),
    card=st.sampled_from(sorted(CARDS)),
    mix=mixes,
    weights=st.sampled_from(["bf16", "int8", "fp8", "int4"]),
)
def test_on_equal_cards_one_pool_never_costs_more(shape: ModelShape, card: str, mix: Mix, weights: str) -> None:
    workload = replace(BF16, weights=weight_format(weights))
    pool = one_pool(CARDS[card], shape, workload, mix)
    split = two_pools(CARDS[card], CARDS[card], shape, workload, mix)
    if pool is None or split is None:
        assert pool is split is None
        return
    assert pool.nanos(10**6 * pool.both_s) <= split.nanos(10**6) + 2
    best = best_two_pools(CARDS[card], shape, workload, mix)
    assert best is not None
    assert best.nanos(10**6) <= split.nanos(10**6)
    assert split.sent_bytes / split.prefill.prefill_s <= LINK_BYTES_PER_S * 1.000001


def test_each_half_is_cheapest_on_the_card_that_is_made_for_it() -> None:
    """The prices are made up, as prices are: one card computes more for a dollar, the other one reads more."""
    mix = Mix(prompt_tokens=8000, cached_tokens=0, output_tokens=1000)
    compute, read = replace(CARDS["b200"], price_nanos=10**9), replace(CARDS["h200"], price_nanos=5 * 10**8)
    found = [two_pools(*cards, LARGE, BF16, mix) for cards in ((compute, read), (compute, compute), (read, compute))]
    costs = [split.nanos(1000) for split in found if split is not None]
    assert len(costs) == 3
    assert costs == sorted(costs)


def test_a_link_that_is_slower_than_the_prompts_sets_the_pace() -> None:
    mix = Mix(prompt_tokens=1096, cached_tokens=0, output_tokens=64)
    split = two_pools(CARDS["mi300x"], CARDS["mi300x"], SMALL, BF16, mix)
    assert split is not None
    assert split.sent_bytes == sequence_parts(SMALL, BF16.kv, 1096, 16).total
    assert split.prefill.prefill_s == pytest.approx(split.sent_bytes / LINK_BYTES_PER_S)
    half = two_pools(CARDS["mi300x"], CARDS["mi300x"], SMALL, replace(BF16, kv=kv_format("int8")), mix)
    assert half is not None
    assert half.sent_bytes < 0.6 * split.sent_bytes


def test_hosts_have_as_many_cards_as_pays() -> None:
    mix = Mix(prompt_tokens=256, cached_tokens=0, output_tokens=2000)
    split = two_pools(CARDS["h100"], CARDS["h100"], LARGE, BF16, mix)
    assert split is not None
    assert split.prefill.cards == 2, "the least that hold the weights: prompts share their reading anyway"
    assert split.decode.cards > 2, "room for a batch that shares it"
    assert split.decode.batch > 10 * split.prefill.batch


def test_what_can_not_be_reckoned_is_said() -> None:
    mix = Mix(prompt_tokens=256, cached_tokens=0, output_tokens=16)
    with pytest.raises(ConfigError, match="Nobody knows how fast card computes"):
        one_pool(find_card("80:5000"), SMALL, BF16, mix)
    tiny = replace(CARDS["t4"], memory_bytes=10**8)
    assert one_pool(tiny, LARGE, BF16, mix) is None
    assert two_pools(tiny, CARDS["h100"], LARGE, BF16, mix) is None
