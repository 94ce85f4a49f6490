"""Heads read back as they were written; whatever doesn't fit is refused in a sentence that names it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.load.meta import HEADS_FILE, read_meta
from engine.spec.heads_file import CONFIG_FILE, Heads, has_heads, read_heads, save_heads
from engine.spec.heads_loss import initial_parts

HIDDEN, VOCAB = 64, 384
FITS: dict[str, Any] = {"model_digest": "abc", "model": "toy", "hidden": HIDDEN, "vocab_size": VOCAB}


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    ids = torch.arange(0, VOCAB, 3, dtype=torch.int32)
    parts = initial_parts(torch.randn(len(ids), HIDDEN), num_heads=3, inner=32, seed=1) | {"ids": ids}
    made = Heads(model_digest="abc", num_heads=3, hidden=HIDDEN, inner=32, vocab_size=VOCAB, parts=parts)
    save_heads(tmp_path / "heads", made, {"model": "toy", "seed": 1})
    return tmp_path / "heads"


def refused(heads: Path, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        read_heads(heads, **(FITS | changes))
    return str(caught.value)


def test_they_read_back_as_written(heads: Path) -> None:
    found = read_heads(heads, **FITS)
    assert has_heads(heads) and not has_heads(heads.parent)
    assert (found.num_heads, found.inner, len(found.ids)) == (3, 32, VOCAB // 3)
    assert {name: tuple(part.shape) for name, part in found.parts.items()} == found.shapes()
    assert json.loads((heads / CONFIG_FILE).read_text())["seed"] == 1
    assert found.parts["head"].dtype == torch.bfloat16


def test_heads_of_another_model_are_refused(heads: Path) -> None:
    assert "for toy" in refused(heads, model_digest="def", model="other") and "heads:4" in refused(
        heads, model_digest="def"
    )
    assert "(64, 384)" in refused(heads, hidden=128)
    assert "(64, 384)" in refused(heads, vocab_size=400)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": 2}, "format 2"),
        ({"num_heads": 2}, "2 heads"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 999}, "num_heads"),
        ({"inner": 33}, "shape"),
        ({"inner": "wide"}, "inner"),
    ],
)
def test_a_config_that_does_not_fit_its_tensors_is_refused(heads: Path, changes: dict[str, Any], says: str) -> None:
    path = heads / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert says in refused(heads)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("ids", torch.arange(VOCAB // 3), "int32"),
        ("ids", torch.zeros(VOCAB // 3, dtype=torch.int32), "different tokens"),
        ("ids", torch.arange(VOCAB, VOCAB + VOCAB // 3, dtype=torch.int32), "from 0 to 383"),
        ("head", torch.zeros(VOCAB // 3, HIDDEN + 1), "shape"),
        ("head", torch.zeros(VOCAB // 3, HIDDEN, dtype=torch.float64), "type"),
        ("1.down", torch.full((HIDDEN, 32), float("nan")), "finite"),
        ("more", torch.zeros(1), "more"),
    ],
)
def test_tensors_that_can_not_be_used_are_refused(heads: Path, name: str, tensor: torch.Tensor, says: str) -> None:
    parts = load_file(heads / HEADS_FILE) | {name: tensor}
    save_file(parts, heads / HEADS_FILE)
    assert says in refused(heads)


def test_files_that_are_damaged_or_missing_are_refused(heads: Path) -> None:
    whole = (heads / HEADS_FILE).read_bytes()
    (heads / HEADS_FILE).write_bytes(whole[: len(whole) // 2])
    assert "no usable safetensors file" in refused(heads)
    (heads / CONFIG_FILE).unlink()
    assert CONFIG_FILE in refused(heads)


def test_they_may_lie_beside_a_model_without_being_part_of_it(heads: Path, tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    before = read_meta(model)
    shutil.copy(heads / HEADS_FILE, model)
    assert read_meta(model) == before
