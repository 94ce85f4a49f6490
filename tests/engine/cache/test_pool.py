"""KV memory: copies, poison, and a wire layout that comes back as it went and refuses what is not its own."""

from __future__ import annotations

import psutil
import pytest
import torch

from engine.cache.layout import Layout, PairLayout, TokenLayout
from engine.cache.pool import KVPool, block_bytes
from engine.errors import EngineError
from engine.model.config import ModelConfig
from engine.sched.plan import BlockCopy

MODEL = ModelConfig(
    vocab_size=10,
    hidden=8,
    mlp=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    context_tokens=64,
    norm_eps=1e-5,
    rope_theta=1e4,
)


def make_pool(
    *,
    kv_format: str = "float32",
    block_tokens: int = 4,
    num_blocks: int = 7,
    seed: int | None = 0,
    kind: type[TokenLayout | PairLayout] = TokenLayout,
) -> KVPool:
    layout: Layout = kind(block_tokens, MODEL.num_kv_heads, MODEL.head_dim)
    pool = KVPool(MODEL, kv_format=kv_format, block_tokens=block_tokens, num_blocks=num_blocks, layout=layout)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for layer in range(MODEL.num_layers):
            for cache in pool.layer(layer):
                cache.copy_(torch.randn(cache.shape, generator=generator))
    return pool


def content(pool: KVPool, block: int) -> list[torch.Tensor]:
    return [cache[block].clone() for layer in range(MODEL.num_layers) for cache in pool.layer(layer)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kv_format", ["float32", "bf16"])
def test_blocks_travel_to_another_pool(kv_format: str) -> None:
    source, target = make_pool(kv_format=kv_format), make_pool(kv_format=kv_format, num_blocks=9, seed=1)
    untouched = content(target, 3)
    data = source.export_blocks([5, 0, 2])
    assert len(data) < 3 * block_bytes(MODEL, kv_format, 4) + 200
    target.import_blocks([1, 8, 0], data)
    for there, here in ((1, 5), (8, 0), (0, 2)):
        assert same(content(target, there), content(source, here))
    assert same(content(target, 3), untouched)


@pytest.mark.parametrize(
    ("here", "there"), [(TokenLayout, PairLayout), (PairLayout, TokenLayout), (PairLayout, PairLayout)]
)
def test_blocks_travel_between_layouts(here: type[TokenLayout], there: type[PairLayout]) -> None:
    """The tiers of two processes may differ; what a block holds is the same to both."""
    source, target = make_pool(kind=here), make_pool(kind=there, num_blocks=9, seed=1)
    data = source.export_blocks([5, 0])
    target.import_blocks([2, 7], data)
    assert target.export_blocks([2, 7]) == data
    again = make_pool(kind=here, seed=2)
    again.import_blocks([5, 0], target.export_blocks([2, 7]))
    assert same(content(again, 5), content(source, 5))
    assert same(content(again, 0), content(source, 0))


def test_the_pair_layout_puts_pairs_together() -> None:
    token, pair = make_pool(seed=3), make_pool(kind=PairLayout, seed=4)
    pair.import_blocks([0], token.export_blocks([0]))
    for layer in range(MODEL.num_layers):
        (k, v), (pk, pv) = token.layer(layer), pair.layer(layer)
        for at, head, dim in ((0, 0, 0), (3, 1, 5), (2, 0, 3)):
            assert pk[0, head, dim // 2, at, dim % 2] == k[0, at, head, dim]
            assert pv[0, head, at // 2, dim, at % 2] == v[0, at, head, dim]


def test_the_wire_layout_is_what_its_description_says() -> None:
    """Another process, or an older version of us, reads these bytes: they may not change silently."""
    pool = make_pool()
    data = pool.export_blocks([4])
    assert data[:8] == b"BSKV\0\0\0\1"
    assert data[12 : 12 + len(pool.layout_id)] == b"kv1/float32/layers=3/kv_heads=2/head_dim=6/block_tokens=4"
    payload = torch.frombuffer(bytearray(data[-block_bytes(MODEL, "float32", 4) :]), dtype=torch.float32)
    wire = payload.view(3, 2, 2, 4, 6)  # layers, K and V, kv heads, tokens, dim
    for layer in range(3):
        for side, cache in enumerate(pool.layer(layer)):
            assert torch.equal(wire[layer, side], cache[4].transpose(0, 1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_format": "bf16"}, "layout"),
        ({"block_tokens": 8}, "layout kv1/float32/.*expected"),
    ],
)
def test_another_layout_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        make_pool(**change).import_blocks([0], make_pool().export_blocks([0]))


def test_damaged_or_missing_blocks_are_refused_and_change_nothing() -> None:
    pool, target = make_pool(), make_pool(seed=1)
    data = pool.export_blocks([1])
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    before = content(target, 0)
    for bad in (b"", data[:40], data[:-1], data + b"\0", flipped, b"XSKV" + data[4:], data[:7] + b"\2" + data[8:]):
        with pytest.raises(EngineError, match=r"\.$"):
            target.import_blocks([0], bad)
    with pytest.raises(EngineError, match="not 2 in number"):
        target.import_blocks([0, 1], data)
    assert same(content(target, 0), before)


def test_copies_run_in_their_order() -> None:
    pool = make_pool()
    one = content(pool, 1)
    pool.copy([BlockCopy(source=1, target=2), BlockCopy(source=2, target=5)])
    assert same(content(pool, 2), one)
    assert same(content(pool, 5), one)
    assert same(content(pool, 1), one)


def test_poison_covers_exactly_its_blocks() -> None:
    pool = make_pool()
    others = [content(pool, block) for block in (0, 1, 2, 4, 6)]
    pool.poison([3, 5])
    assert all(x.isnan().all() for block in (3, 5) for x in content(pool, block))
    assert all(same(content(pool, b), o) for b, o in zip((0, 1, 2, 4, 6), others, strict=True))


def test_memory_is_taken_only_when_written() -> None:
    """A pool is sized for the worst case; a short job must not pay for it."""
    process = psutil.Process()
    before = process.memory_info().rss
    blocks = (512 << 20) // block_bytes(MODEL, "float32", 4)
    pool = make_pool(num_blocks=blocks, seed=None)
    pool.poison([blocks - 1])
    assert process.memory_info().rss - before < 64 << 20
