"""The arithmetic of memory: parts add up, more of anything never takes less, and the pool has the counted size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.layout import Layout, PairLayout, ScaledLayout, TokenLayout
from engine.cache.pool import DTYPES, KVPool
from engine.config import KV_FORMATS, WEIGHT_FORMATS
from engine.errors import ConfigError
from engine.memory.formats import GROUPS, WeightFormat, head_format, kv_format, weight_format
from engine.memory.shape import ModelShape
from engine.memory.sizing import Workload, attended_parts, block_bytes, demand, sequence_parts, weight_parts
from engine.memory.sources import TEXTBOOKS
from tests.engine.memory.shapes import KV, WEIGHTS, shapes, workloads

TEXTBOOK = TEXTBOOKS["llama-70b"]


def textbook(weights: str = "16", kv: str = "16") -> Workload:
    return Workload(
        context_tokens=131_072, concurrency=8, weights=weight_format(weights), kv=kv_format(kv), block_tokens=16
    )


def test_the_textbook_answers_as_textbooks_do() -> None:
    needs = demand(TEXTBOOK, textbook())
    assert needs.weights.total == 140_000_000_000
    assert needs.kv.total == 8 * 131_072 * 2 * 80 * 8 * 128 * 2 == 343_597_383_680
    assert needs.total_bytes == 483_597_383_680
    assert demand(TEXTBOOK, textbook("8")).weights.values == 70_000_000_000
    assert demand(TEXTBOOK, textbook("4")).weights.values == 35_000_000_000
    quarter = demand(TEXTBOOK, textbook("4", "8"))
    assert quarter.kv == (171_798_691_840, 8 * 131_072 * 2 * 80 * 8 * 4)
    assert quarter.weights.scales == 8_544_922 * 64 * 4


@settings(max_examples=40)
@given(shape=shapes(), workload=workloads())
def test_parts_add_up(shape: ModelShape, workload: Workload) -> None:
    needs = demand(shape, workload)
    assert needs.total_bytes == sum(needs.weights) + sum(needs.kv)
    assert needs.kv == tuple(
        workload.concurrency * part
        for part in sequence_parts(shape, workload.kv, workload.context_tokens, workload.block_tokens)
    )
    assert 0 < needs.step_bytes <= needs.total_bytes
    copy = shape.head.elements if shape.head is not None and shape.is_tied else 0
    assert weight_parts(shape, weight_format("bf16")) == (2 * (shape.num_parameters + copy), 0)


@settings(max_examples=40)
@given(shape=shapes(), workload=workloads(), more=st.integers(0, 1 << 16))
def test_more_context_and_more_sequences_never_take_less(shape: ModelShape, workload: Workload, more: int) -> None:
    needs = demand(shape, workload)
    for bigger in (
        replace(workload, context_tokens=workload.context_tokens + more),
        replace(workload, concurrency=workload.concurrency + more),
    ):
        grown = demand(shape, bigger)
        assert grown.total_bytes >= needs.total_bytes
        assert grown.workspace_bytes >= needs.workspace_bytes
    if more:
        assert demand(shape, replace(workload, concurrency=workload.concurrency + more)).kv.total > needs.kv.total


def stored_bits(form: WeightFormat) -> float:
    """Of a weight in long rows, scales included."""
    return form.bits + (form.scale_bits + form.zero_bits) / (form.group or 8192)


@settings(max_examples=40)
@given(shape=shapes())
def test_fewer_bits_never_take_more(shape: ModelShape) -> None:
    untied = replace(shape, is_tied=False)
    ordered = sorted((form for form in WEIGHTS if form.group), key=stored_bits)
    sizes = [weight_parts(untied, form).total for form in ordered]
    assert sizes == sorted(sizes)
    assert weight_parts(untied, weight_format("int4")).values < weight_parts(untied, weight_format("bf16")).values
    of_kv = [sequence_parts(shape, form, 1000, 16).total for form in KV]
    assert of_kv[0] > of_kv[1] > of_kv[2] == of_kv[3]


@settings(max_examples=40)
@given(shape=shapes(), kv=st.sampled_from(KV), context=st.integers(1, 100_000), block=st.sampled_from([1, 16, 64]))
def test_a_sequence_takes_whole_blocks(shape: ModelShape, kv: object, context: int, block: int) -> None:
    blocks = -(-context // block)
    assert sequence_parts(shape, kv, context, block).total == blocks * block_bytes(shape, kv, block)
    full = replace(shape, window=0, window_layers=0)
    assert attended_parts(full, kv, context) == sequence_parts(shape, kv, context, 1)
    assert attended_parts(shape, kv, context).total <= attended_parts(full, kv, context).total


@pytest.mark.parametrize(
    ("kv", "layout"),
    [
        ("float32", TokenLayout),
        ("bf16", TokenLayout),
        ("bf16", PairLayout),
        ("int8", ScaledLayout),
    ],
)
def test_the_pool_takes_what_is_counted(kv: str, layout: Callable[[int, int, int], Layout]) -> None:
    shape = replace(TEXTBOOK, num_layers=3, num_kv_heads=2, head_dim=64)
    pool = KVPool(shape, kv_format=kv, block_tokens=16, num_blocks=5, layout=layout(16, 2, 64))
    held = sum(cache.numel() * cache.itemsize for index in range(3) for cache in pool.layer(index))
    assert held == 5 * block_bytes(shape, kv_format(kv), 16)


def test_every_format_of_the_engine_is_known() -> None:
    for name in WEIGHT_FORMATS:
        assert str(weight_format(name)).split()[0] == name
    for name in KV_FORMATS:
        assert kv_format(name).value_bytes == DTYPES[name].itemsize


@pytest.mark.parametrize(
    ("name", "columns", "kept"),
    [
        *(("bf16", 576, "bf16"), ("int8", 576, "int8"), ("fp8", 576, "bf16"), ("float32", 64, "float32")),
        *(("w4a16", 576, "w8a16 (groups of 64)"), ("int4", 96, "w8a16 (groups of 32)"), ("w8a16", 80, "bf16")),
    ],
)
def test_a_head_beside_groups_has_8_bits(name: str, columns: int, kept: str) -> None:
    assert str(head_format(weight_format(name), columns)) == kept


@pytest.mark.parametrize(("spelled", "name"), [("16", "bf16"), (" FP16", "bf16"), ("8", "int8"), ("4", "int4")])
def test_formats_are_named_by_their_bits_too(spelled: str, name: str) -> None:
    assert weight_format(spelled).name == name


def test_groups_and_zero_points_are_counted() -> None:
    for group in GROUPS:
        form = weight_format("int4", group=group, has_zero_points=True)
        assert (form.group, form.scale_bits, form.zero_bits) == (group, 32, 16)
    assert weight_format("awq") == replace(weight_format("int4", has_zero_points=True), name="awq")
    for wrong in ({"group": 48}, {"group": 0}):
        with pytest.raises(ConfigError, match="A group has 32, 64 or 128"):
            weight_format("int4", **wrong)
    with pytest.raises(ConfigError, match="not of bf16"):
        weight_format("16", group=64)
    for name in ("5", "", "nan", "-8"):
        with pytest.raises(ConfigError, match="no weight format"):
            weight_format(name)
        with pytest.raises(ConfigError, match="no KV format"):
            kv_format(name)
