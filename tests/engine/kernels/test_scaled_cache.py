"""KV of 8 bits in plain torch: numbers near what was written, and blocks that other tiers read."""

from __future__ import annotations

import pytest
import torch

from engine.cache.layout import Layout, ScaledLayout, ScaledTokenLayout
from engine.cache.pool import KVPool
from engine.kernels.gpu.layout import HeadLayout
from engine.kernels.scaled_cache import KINDS, read, write
from engine.memory.shape import decoder_shape
from tests.engine.cache.test_pool import MODEL as POOL_MODEL

MOST = {"int8": 0.5 / 127, "fp8": 2.0**-5}
"""How far a number may be off, as a share of the largest of its head."""


def heads(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(seed)) ** 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind: str) -> None:
    x, cache = heads(), torch.zeros(10, 2, 36, dtype=torch.int8)
    slots = torch.tensor([7, 0, 3, 9, 2, 5])
    write(x, cache, slots, KINDS[kind])
    found = read(cache[slots], KINDS[kind])
    assert ((found - x).abs() <= x.abs().amax(-1, keepdim=True) * MOST[kind] * 1.001).all()
    assert not cache[[1, 4, 6, 8]].any(), "nothing else is touched"


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_poison_and_what_is_no_number(kind: str) -> None:
    x, cache = heads(), torch.full((6, 2, 36), -1, dtype=torch.int8)
    assert read(cache, KINDS[kind]).isnan().all(), "a block that was freed is seen"
    x[0], x[1, 0, 3], x[2, 1, 0] = 0, float("nan"), float("inf")
    write(x, cache, torch.arange(6), KINDS[kind])
    found = read(cache, KINDS[kind])
    assert not found[0].any()
    is_lost = found.isnan().all(-1)
    assert is_lost.nonzero().tolist() == [[1, 0], [2, 1]]
    assert found.isnan().any(-1).equal(is_lost)


@pytest.mark.parametrize(
    "other", [ScaledLayout, lambda tokens, heads, dim: HeadLayout(tokens, heads, dim, True)], ids=["cpu", "gpu"]
)
def test_blocks_travel_to_the_layouts_of_other_tiers(other: type[ScaledLayout]) -> None:
    model = POOL_MODEL
    sizes = (4, model.num_kv_heads, 8)
    shape = decoder_shape(
        vocab_size=8, hidden=8, mlp=8, num_layers=2, num_heads=2, num_kv_heads=sizes[1], head_dim=8, context_tokens=64
    )

    def pool(layout: Layout) -> KVPool:
        return KVPool(shape, kv_format="int8", block_tokens=4, num_blocks=5, layout=layout)

    here, there, back = pool(ScaledTokenLayout(*sizes)), pool(other(*sizes)), pool(ScaledTokenLayout(*sizes))
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for cache in here.layer(layer):
            cache.copy_(torch.randint(-128, 128, cache.shape, generator=generator, dtype=torch.int8))
    there.import_blocks([4, 1], here.export_blocks([0, 3]))
    assert there.export_blocks([4, 1]) == here.export_blocks([0, 3])
    back.import_blocks([0, 3], there.export_blocks([4, 1]))
    for layer in range(2):
        for one, again in zip(here.layer(layer), back.layer(layer), strict=True):
            assert torch.equal(one[[0, 3]], again[[0, 3]])


def test_the_wire_has_keys_in_fours_and_values_in_pairs() -> None:
    layout = ScaledTokenLayout(2, 1, 8)
    block = torch.arange(2 * 12, dtype=torch.int8).view(1, 2, 1, 12)  # two tokens, each 8 numbers and 4 bytes of scale
    assert layout.k_to_wire(block)[0, 0].tolist() == [
        *(0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 16, 17, 18, 19),
        *(8, 9, 10, 11, 20, 21, 22, 23),
    ]
    assert layout.v_to_wire(block)[0, 0].tolist() == [
        *(number for dim in range(8) for number in (dim, 12 + dim)),
        *(8, 9, 10, 11, 20, 21, 22, 23),
    ]
