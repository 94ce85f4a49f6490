"""What fits: the largest batch does and one more doesn't, every way out fits, and speed follows bytes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.memory.cards import CARDS, Card, find_card
from engine.memory.fit import (
    cards_needed,
    decode_ceiling,
    fits,
    largest_batch,
    largest_context,
    nanos_per_million_tokens,
    tensor_parallel,
    ways_out,
)
from engine.memory.formats import kv_format, weight_format
from engine.memory.shape import ModelShape
from engine.memory.sizing import Workload, demand
from engine.memory.sources import TEXTBOOKS
from tests.engine.memory.shapes import shapes, workloads

TEXTBOOK = TEXTBOOKS["llama-70b"]
WORKLOAD = Workload(
    context_tokens=131_072, concurrency=8, weights=weight_format("16"), kv=kv_format("16"), block_tokens=16
)
H100 = CARDS["h100"]
cards_drawn = st.sampled_from(list(CARDS.values()))


def test_the_textbook_takes_seven_cards() -> None:
    needs = demand(TEXTBOOK, WORKLOAD)
    assert cards_needed(needs, H100) == 7
    assert tensor_parallel(TEXTBOOK, needs, H100, at_least=7) == 8, "7 cards can't split 8 KV heads evenly"
    assert largest_batch(TEXTBOOK, WORKLOAD, H100, 7) == 9
    rate = decode_ceiling(needs, WORKLOAD, H100, 7)
    assert rate == Fraction(8 * 7 * 3350 * 10**9, 483_597_383_680)
    assert nanos_per_million_tokens(rate, 2_500_000_000, 7) == 12_531_026_733


def test_heads_are_split_evenly_or_copied() -> None:
    small = replace(WORKLOAD, context_tokens=128, concurrency=1)
    needs = demand(TEXTBOOK, small)
    odd = replace(TEXTBOOK, num_heads=24)
    assert tensor_parallel(odd, needs, H100, at_least=3) == 4, "3 cards split 24 heads, but not 8 KV heads"
    assert tensor_parallel(TEXTBOOK, needs, H100, at_least=9) == 16, "with two copies of each KV head"
    assert tensor_parallel(TEXTBOOK, needs, H100, at_least=65) is None
    one_kv_head = replace(TEXTBOOK, num_kv_heads=1)
    kept = demand(one_kv_head, replace(WORKLOAD, concurrency=16))
    assert kept.kv.total > H100.memory_bytes, "each card would hold all of it"
    assert tensor_parallel(one_kv_head, kept, H100, at_least=3) is None


@settings(max_examples=40)
@given(shape=shapes(), workload=workloads(), card=cards_drawn)
def test_the_cards_needed_hold_it_and_one_less_does_not(shape: ModelShape, workload: Workload, card: Card) -> None:
    needs = demand(shape, workload)
    cards = cards_needed(needs, card)
    if cards is None:
        assert not fits(needs, card, 1_000_000)
        return
    assert fits(needs, card, cards)
    assert cards == 1 or not fits(needs, card, cards - 1)
    split = tensor_parallel(shape, needs, card, at_least=cards)
    if split is not None:
        assert split >= cards
        assert shape.num_heads % split == 0
        share = needs.weights.total / split + needs.kv.total / min(split, shape.num_kv_heads)
        assert share + needs.workspace_bytes <= card.memory_bytes


@settings(max_examples=40)
@given(shape=shapes(), workload=workloads(), card=cards_drawn, cards=st.integers(1, 16))
def test_the_largest_batch_fits_and_one_more_does_not(
    shape: ModelShape, workload: Workload, card: Card, cards: int
) -> None:
    batch = largest_batch(shape, workload, card, cards)
    assert batch == 0 or fits(demand(shape, replace(workload, concurrency=batch)), card, cards)
    assert not fits(demand(shape, replace(workload, concurrency=batch + 1)), card, cards)


@settings(max_examples=40)
@given(shape=shapes(), workload=workloads(), card=cards_drawn, cards=st.integers(1, 16))
def test_the_largest_context_fits_and_a_block_more_does_not(
    shape: ModelShape, workload: Workload, card: Card, cards: int
) -> None:
    context = largest_context(shape, workload, card, cards)
    assert context == 0 or fits(demand(shape, replace(workload, context_tokens=context)), card, cards)
    longer = context + workload.block_tokens
    if longer <= workload.context_tokens:
        assert not fits(demand(shape, replace(workload, context_tokens=longer)), card, cards)


@settings(max_examples=40)
@given(shape=shapes(), workload=workloads(), card=cards_drawn, cards=st.integers(1, 4))
def test_every_way_out_fits_and_changes_something(
    shape: ModelShape, workload: Workload, card: Card, cards: int
) -> None:
    needs = demand(shape, workload)
    if fits(needs, card, cards):
        return
    for way in ways_out(shape, workload, card, cards):
        assert fits(demand(shape, way.workload), card, way.cards)
        assert way.total_bytes == demand(shape, way.workload).total_bytes
        assert (way.cards > cards) == (way.kind == "cards")
        assert way.kind == "cards" or way.total_bytes < needs.total_bytes


def test_ways_out_are_told_with_their_numbers() -> None:
    short = replace(WORKLOAD, context_tokens=8192, weights=weight_format("8"))
    kinds = {way.kind: way for way in ways_out(TEXTBOOK, short, H100, 1)}
    assert kinds["format"].sentence == "weights in int4 (groups of 128) and KV in bf16"
    assert kinds["concurrency"].sentence == "3 sequences of 8,192 tokens"
    assert kinds["context"].sentence == "contexts of 3,376 tokens"
    assert kinds["cards"].sentence == "2 x H100 (80 GB)"
    [more] = ways_out(TEXTBOOK, WORKLOAD, CARDS["l4"], 1)
    assert more.kind == "cards"
    assert ways_out(TEXTBOOK, replace(WORKLOAD, context_tokens=1 << 30), CARDS["l4"], 1) == []


@settings(max_examples=40)
@given(shape=shapes(), workload=workloads(), more=st.integers(1, 10_000))
def test_speed_follows_bytes(shape: ModelShape, workload: Workload, more: int) -> None:
    rate = decode_ceiling(demand(shape, workload), workload, H100, 1)
    bigger = replace(workload, concurrency=workload.concurrency + more)
    longer = replace(workload, context_tokens=workload.context_tokens + more)
    assert decode_ceiling(demand(shape, bigger), bigger, H100, 1) > rate, "weights are read once for all"
    assert decode_ceiling(demand(shape, longer), longer, H100, 1) <= rate
    assert decode_ceiling(demand(shape, workload), workload, H100, 3) == 3 * rate
    one, three = nanos_per_million_tokens(rate, 10**9, 1), nanos_per_million_tokens(3 * rate, 10**9, 3)
    assert one == three


def test_readme_shows_every_card() -> None:
    readme = Path(__file__, "../../../../README.md").resolve().read_text(encoding="utf-8")
    for name, card in CARDS.items():
        numbers = (card.memory_bytes / 1e9, card.read_bytes_per_s / 1e9, (card.price_nanos or 0) / 1e9)
        assert "| `{}` | {:g} | {:,.0f} | {:.2f} |".format(name, *numbers) in readme


def test_cards_are_found_by_name_or_numbers() -> None:
    assert find_card(" H100 ") is H100
    assert find_card("NVIDIA H200").memory_bytes == 141 * 10**9
    own = find_card("47.5:864")
    assert (own.memory_bytes, own.read_bytes_per_s, own.price_nanos) == (47_500_000_000, 864_000_000_000, None)
    assert str(own) == "card (47.5 GB)"
    assert str(H100) == "H100 (80 GB)"
    for wrong in ("", "h1000", "0:5", "5:0", "nan:1", "-1:5", "1e9:1", "9999999:1", "１:２"):
        with pytest.raises(ConfigError, match="There is no card"):
            find_card(wrong)
