"""GGUF's blocks as integers in groups: the numbers that the `gguf` package reads, and models that run as stored."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.load.gguf_groups import KINDS, grouped
from engine.load.kept import kept_format
from engine.runner import ModelRunner
from tests.engine.load.test_weights import to_gguf
from tests.engine.stepping import Stepper, make_runner
from tests.tiny import make_tiny_model

HEADS = {Kind.Q4_0: 2, Kind.Q4_1: 4, Kind.Q5_0: 2, Kind.Q5_1: 4, Kind.Q8_0: 2, Kind.Q4_K: 4, Kind.Q5_K: 4}
"""Bytes of the float16 numbers that each block begins with."""
PROMPT = [list(range(3, 60))]
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def blocks(kind: Kind, count: int, heads: list[float] | None = None) -> np.ndarray:
    """Blocks of any bits behind steps (and least values) that are numbers."""
    random = np.random.default_rng(int(kind))
    raw = random.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    numbers = random.standard_normal((count, HEADS[kind] // 2)) if heads is None else np.tile(heads, (count, 1))
    raw[:, : HEADS[kind]] = numbers.astype("<f2").view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_codes_stand_for_the_numbers_that_the_package_reads(kind: Kind) -> None:
    raw = blocks(kind, 12)
    weight = grouped(raw.reshape(-1), kind, 3)
    assert weight is not None
    expected = torch.from_numpy(gguf.dequantize(raw, kind).reshape(3, -1))
    assert (weight.bits, weight.group) == (KINDS[kind].bits, 32)
    assert (weight.zero is not None) == KINDS[kind].has_zeros
    found = weight.dequantized()
    assert torch.allclose(found, expected, rtol=1e-5, atol=float(expected.abs().max()) * 2e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].has_zeros], ids=lambda kind: kind.name)
@pytest.mark.parametrize("heads", [[0.0, 0.75], [0.0, 0.0], [-0.5, 0.25]])
def test_groups_without_a_step_and_with_a_negative_one(kind: Kind, heads: list[float]) -> None:
    raw = blocks(kind, 4, heads)
    weight = grouped(raw.reshape(-1), kind, 2)
    assert weight is not None
    expected = torch.from_numpy(gguf.dequantize(raw, kind).reshape(2, -1))
    assert torch.allclose(weight.dequantized(), expected, rtol=1e-5, atol=1e-5)
    assert (weight.scale != 0).all()


def test_what_cannot_be_kept_is_left_to_floats() -> None:
    assert grouped(np.zeros(210, np.uint8), Kind.Q6_K, 1) is None
    for kind in KINDS:
        assert grouped(blocks(kind, 2, [float("nan")] * (HEADS[kind] // 2)).reshape(-1), kind, 1) is None


def model(path: Path, kinds: dict[str, Kind], **changes: object) -> Path:
    """A GGUF file whose matrices have these formats, `kinds` by part."""
    directory = make_tiny_model(path / "hf", **changes)
    quantized = {f"blk.{layer}.{part}.weight": kind for layer in range(2) for part, kind in kinds.items()}
    return to_gguf(directory, path / "model.gguf", quantized=quantized)


def logits(path: Path, **formats: str) -> torch.Tensor:
    return Stepper(make_runner(path, **formats), PROMPT).logits([57])[0]


@pytest.mark.parametrize(
    ("kind", "kept"), [(Kind.Q4_0, "w4a16"), (Kind.Q4_1, "w4a16"), (Kind.Q5_1, "w8a16"), (Kind.Q8_0, "w8a16")]
)
@pytest.mark.parametrize("wide", [False, True], ids=["torch", "compiled"])
def test_a_file_runs_as_it_is_stored(tmp_path: Path, kind: Kind, kept: str, wide: bool) -> None:
    """The same as its numbers in bf16, but for bf16's rounding of them and a head of 8 bits; as large as planned."""
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 2, "mlp": 192} if wide else {}
    path = model(tmp_path, dict.fromkeys(MATRICES, kind), **sizes)
    assert kept_format(path) == kept
    runner = make_runner(path, weight_format=kept, kv_format="bf16")
    assert runner.kernels.is_fused == wide
    found = Stepper(runner, PROMPT).logits([57])[0]
    p, q = (rows.log_softmax(-1) for rows in (logits(path, weight_format="bf16", kv_format="bf16"), found))
    assert float((p.exp() * (p - q)).sum(-1).mean()) < 2e-3
    weights = runner._decoder._weights
    assert all(layer.qkv.bits == int(kept[1]) for layer in weights.layers)
    held = sum(
        part.numel() * part.itemsize
        for layer in weights.layers
        for m in (layer.qkv, layer.out, layer.gate_up, layer.down)
        for part in (m.packed, m.scale, m.zero)
        if part is not None
    )
    beside = 2 * weights.embedding.numel() * 2
    assert held + beside <= runner.memory.weight_bytes < (held + beside) * 1.03
    with pytest.raises(ConfigError, match="aren't stored as"):
        make_runner(path, weight_format="w8a16" if kept == "w4a16" else "w4a16")


def test_what_becomes_of_the_rest_is_said(tmp_path: Path) -> None:
    """Like files of Q4_K_M: v and down have another format than the others."""
    kinds = {**dict.fromkeys(MATRICES, Kind.Q4_0), "attn_v": Kind.Q8_0, "ffn_down": Kind.Q8_0}
    path = model(tmp_path, kinds)
    said: list[str] = []

    def run(weight_format: str) -> ModelRunner:
        said.clear()
        return ModelRunner(
            EngineConfig(model=str(path), weight_format=weight_format, kv_format="bf16", num_blocks=2, threads=1),
            said.append,
        )

    layers = run("w4a16")._decoder._weights.layers
    assert [layer.qkv.bits for layer in layers] == [0, 0], "one kernel can't read both"
    assert [layer.down.bits for layer in layers] == [8, 8]
    assert "4 in Q4_0 and 2 in Q8_0 have no kernel, alone or beside others, and become bf16" in said[0]
    run("bf16")
    assert said[0].startswith("The matrices of ")
    assert "(10 in Q4_0 and 4 in Q8_0) and are converted to bf16; the weight format w4a16 keeps what it can" in said[0]


def test_a_plain_file_is_converted_without_a_word(tmp_path: Path) -> None:
    path = model(tmp_path, {})
    said: list[str] = []
    ModelRunner(EngineConfig(model=str(path), weight_format="float32", kv_format="float32", num_blocks=2), said.append)
    assert said == []
    assert kept_format(path) is None
