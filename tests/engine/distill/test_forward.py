"""The pass that torch derives gives the engine's logits for every family, however examples are packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.distill import forward, student
from engine.distill.capture import Scorer
from engine.distill.pack import Example, common_tokens, pack, packed_order
from engine.distill.targets import Targets, draw
from engine.load.weights import open_model
from tests.families import gemma3, make_family, mistral, qwen2, qwen3
from tests.tiny import make_tiny_model

SHARED = tuple(range(3, 40))
TAILS = ((50, 51, 52, 60), (50, 70), (90, 91, 92, 93, 94, 95, 96, 97, 98))


def targets(rows: int) -> Targets:
    return draw(
        torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)), top=2, tail=2, temperature=1, seed=0
    )


def packed(tails: tuple[tuple[int, ...], ...]) -> Any:
    return pack([Example((*SHARED, *tail), len(SHARED), targets(len(tail))) for tail in tails])


def own_logits(model: Path, tails: tuple[tuple[int, ...], ...]) -> Tensor:
    begun = student.begin(model, f"layers:{open_model(model)[0].num_layers}")
    found = packed(tails)
    rows = forward.hidden(begun.config, begun.parameters, found)[found.rows]
    return forward.logits(begun.config, begun.parameters, rows)


def engine_logits(model: Path, tails: tuple[tuple[int, ...], ...]) -> Tensor:
    """By the engine's scoring path, one text after the other in the same blocks."""
    scorer = Scorer(str(model), 64, weight_format="float32")
    texts = [(*SHARED, *tail) for tail in tails]
    return torch.cat([part for text in texts for part in scorer.logits(text, len(SHARED))])


VARIANTS: list[dict[str, Any]] = [
    {},
    {"tied": False, "attention_bias": True, "mlp_bias": True},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_llama(tmp_path: Path, variant: dict[str, Any]) -> None:
    model = make_tiny_model(tmp_path / "model", layers=3, **variant)
    assert torch.allclose(own_logits(model, TAILS), engine_logits(model, TAILS), atol=2e-4)


@pytest.mark.parametrize("config", [mistral, qwen2, qwen3, gemma3])
def test_other_families(tmp_path: Path, config: Callable[..., Any]) -> None:
    """Windows of 24 tokens are shorter than these texts."""
    model = make_family(tmp_path / "model", config())
    assert torch.allclose(own_logits(model, TAILS), engine_logits(model, TAILS), atol=2e-4)


def test_a_pack_is_its_examples_one_by_one(tiny_model: Path) -> None:
    alone = torch.cat([own_logits(tiny_model, (tail,)) for tail in TAILS])
    assert torch.allclose(own_logits(tiny_model, TAILS), alone, atol=1e-5)


def test_a_pack_computes_what_is_shared_once() -> None:
    found = packed(TAILS)
    shared = len(SHARED) - 1  # the last one's row predicts, so each has its own
    assert len(found.token_ids) == shared + sum(len(tail) for tail in TAILS)
    assert found.next_ids.tolist() == [token for tail in TAILS for token in tail]
    assert found.positions[found.rows].tolist() == [
        len(SHARED) - 1 + place for tail in TAILS for place in range(len(tail))
    ]
    assert len(found.targets.entropy) == len(found.rows)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    room=st.integers(1, 60),
    data=st.data(),
)
def test_every_example_is_in_one_pack_of_its_family(sizes: list[int], room: int, data: st.DataObject) -> None:
    families = data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes)))
    order = data.draw(st.permutations(range(len(sizes))))
    packs = packed_order(families, sizes, order, [room, 2 * room, room])
    assert sorted(index for one in packs for index in one) == list(range(len(sizes)))
    for one in packs:
        assert len({families[index] for index in one}) == 1
        most = 2 * room if families[one[0]] == 1 else room
        assert sum(sizes[index] for index in one) <= most or len(one) == 1


def test_common_tokens() -> None:
    assert common_tokens([(1, 2, 3), (1, 2, 4)], 3) == 2
    assert common_tokens([(1, 2, 3), (1, 2, 3)], 2) == 2
    assert common_tokens([(1,)], -1) == 0
