"""Shapes and workloads that the tests of the memory planner draw."""

from __future__ import annotations

from hypothesis import strategies as st

from engine.memory.formats import WeightFormat, kv_format, weight_format
from engine.memory.shape import ModelShape, decoder_shape
from engine.memory.sizing import Workload

WEIGHTS: list[WeightFormat] = [
    weight_format("float32"),
    weight_format("bf16"),
    weight_format("int8"),
    weight_format("int8", group=32, has_zero_points=True),
    weight_format("int4", group=32, has_zero_points=True),
    weight_format("gptq"),
    weight_format("int4"),
]
KV = [kv_format(name) for name in ("float32", "bf16", "int8", "fp8")]


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    kv_heads = draw(st.sampled_from([1, 2, 3, 8]))
    layers = draw(st.integers(1, 60))
    window = draw(st.integers(1, 5000))
    return decoder_shape(
        vocab_size=draw(st.integers(256, 300_000)),
        hidden=draw(st.integers(64, 8192)),
        mlp=draw(st.integers(64, 30_000)),
        num_layers=layers,
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([32, 64, 80, 128, 256])),
        context_tokens=8192,
        is_tied=draw(st.booleans()),
        has_qkv_bias=draw(st.booleans()),
        has_qk_norm=draw(st.booleans()),
        windows=[draw(st.sampled_from([0, window]))] * layers if draw(st.booleans()) else [0, *[window] * (layers - 1)],
    )


def workloads(most_context: int = 1 << 20) -> st.SearchStrategy[Workload]:
    return st.builds(
        Workload,
        context_tokens=st.integers(1, most_context),
        concurrency=st.integers(1, 5000),
        weights=st.sampled_from(WEIGHTS),
        kv=st.sampled_from(KV),
        block_tokens=st.sampled_from([1, 16, 32]),
    )
