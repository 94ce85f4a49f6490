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

NUMBERS = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.IQ4_NL), slice(2)),
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), slice(4)),
    Kind.Q6_K: slice(208, 210),
    Kind.Q3_K: slice(108, 110),
    Kind.Q2_K: slice(80, 84),
}
"""Where the float16 numbers of a block are: its step, or that and what its least values are multiples of."""
STEPS = {
    Kind.Q6_K: [4.6e-5],
    Kind.Q5_K: [1e-4, 1.55e-3],
    Kind.Q4_K: [2e-4, 1.5e-3],
    Kind.Q3_K: [1.5e-3],
    Kind.Q2_K: [3.7e-3, 5.5e-3],
    Kind.IQ4_NL: [1e-3],
}
"""With these, blocks of any bits are weights as large as a model's rows of 256 columns have them."""
PROMPT = [list(range(3, 60))]
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def blocks(kind: Kind, count: int, heads: list[float] | None = None) -> np.ndarray:
    """Blocks of any bits behind steps (and least values) that are numbers."""
    random = np.random.default_rng(int(kind))
    raw = random.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    size = len(range(210)[NUMBERS[kind]]) // 2
    numbers = random.standard_normal((count, size)) if heads is None else np.tile(heads, (count, 1))
    raw[:, NUMBERS[kind]] = numbers.astype("<f2").view(np.uint8)
    return raw


def some_blocks(values: np.ndarray, kind: Kind) -> np.ndarray:
    """The values' blocks; of kinds that the package only reads, any others."""
    if kind not in STEPS:
        return gguf.quantize(values, kind)
    return blocks(kind, values.size // GGML_QUANT_SIZES[kind][0], STEPS[kind]).reshape(len(values), -1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_codes_stand_for_the_numbers_that_the_package_reads(kind: Kind) -> None:
    raw = blocks(kind, 12)
    weight = grouped(raw.reshape(-1), kind, 3)
    assert weight is not None
    expected = torch.from_numpy(gguf.dequantize(raw, kind).reshape(3, -1))
    assert (weight.bits, weight.group) == (KINDS[kind].bits, KINDS[kind].group)
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
    assert grouped(np.zeros(136, np.uint8), Kind.IQ4_XS, 1) is None
    for kind in KINDS:
        assert grouped(blocks(kind, 2, [float("nan")] * (1 + KINDS[kind].has_zeros)).reshape(-1), kind, 1) is None


def model(path: Path, kinds: dict[str, Kind], **changes: object) -> Path:
    """A GGUF file whose matrices have these formats, `kinds` by part."""
    directory = make_tiny_model(path / "hf", **changes)
    quantized = {f"blk.{layer}.{part}.weight": kind for layer in range(2) for part, kind in kinds.items()}
    return to_gguf(directory, path / "model.gguf", quantized=quantized, blocks=some_blocks)


def logits(path: Path, **formats: str) -> torch.Tensor:
    return Stepper(make_runner(path, **formats), PROMPT).logits([57])[0]


def mixed(kind: Kind, **others: Kind) -> dict[str, Kind]:
    return {**dict.fromkeys(MATRICES, kind), **others}


FILES = {
    "Q4_0": (mixed(Kind.Q4_0), "w4a16", [4, 4]),
    "Q4_1": (mixed(Kind.Q4_1), "w4a16", [4, 4]),
    "Q5_1": (mixed(Kind.Q5_1), "w8a16", [8, 8]),
    "Q8_0": (mixed(Kind.Q8_0), "w8a16", [8, 8]),
    "Q6_K": (mixed(Kind.Q6_K), "w8a16", [8, 8]),
    "Q4_K_M": (mixed(Kind.Q4_K, attn_v=Kind.Q6_K, ffn_down=Kind.Q6_K), "w4a16", [8, 8]),
    "Q3_K_M": (mixed(Kind.Q3_K, attn_v=Kind.Q5_K, attn_output=Kind.Q4_K, ffn_down=Kind.Q5_K), "w4a16", [8, 8]),
    "Q3_K_S": (mixed(Kind.Q3_K), "w4a16", [4, 4]),
    "Q2_K": (mixed(Kind.Q2_K, attn_v=Kind.Q3_K, attn_output=Kind.Q3_K, ffn_down=Kind.Q3_K), "w4a16", [4, 4]),
    "small": (mixed(Kind.Q4_0, attn_v=Kind.Q8_0, ffn_down=Kind.Q8_0), "w4a16", [8, 8]),
}
"""What llama.cpp mixes in its files: the kinds by part, our format, and bits of the codes of qkv and of down."""


@pytest.mark.parametrize("wide", [False, True], ids=["torch", "compiled"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_runs_as_it_is_stored(tmp_path: Path, name: str, wide: bool) -> None:
    """The same as its numbers in bf16, but for bf16's rounding of them and a head of 8 bits; as large as planned."""
    kinds, kept, bits = FILES[name]
    sizes: dict[str, int] = {"heads": 4, "kv_heads": 2} if wide else {"heads": 16, "kv_heads": 4}
    path = model(tmp_path, kinds, hidden=256, mlp=256, **sizes)
    assert kept_format(path) == kept
    runner = make_runner(path, weight_format=kept, kv_format="bf16")
    assert runner.kernels.is_fused == wide
    found = Stepper(runner, PROMPT).logits([57])[0]
    p, q = (rows.log_softmax(-1) for rows in (logits(path, weight_format="bf16", kv_format="bf16"), found))
    assert float((p.exp() * (p - q)).sum(-1).mean()) < 2e-3
    weights = runner._decoder._weights
    assert all([layer.qkv.bits, layer.down.bits] == bits for layer in weights.layers)
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
    parts = [part for m in matrices for part in (m.packed, m.scale, m.zero) if part is not None]
    held = sum(part.numel() * part.itemsize for part in (weights.embedding, *parts))
    assert runner.memory.weight_bytes - held == 2 * 5 * 256, "norms beside, counted with 2 bytes"
    with pytest.raises(ConfigError, match="aren't stored as"):
        make_runner(path, weight_format="w8a16" if kept == "w4a16" else "w4a16")


def test_what_becomes_of_the_rest_is_said(tmp_path: Path) -> None:
    """Of a format whose codes stand for numbers of a table, which nothing but floats can be made of."""
    path = model(tmp_path, mixed(Kind.Q4_0, attn_v=Kind.IQ4_NL, ffn_down=Kind.IQ4_NL), hidden=256, mlp=256)
    said: list[str] = []

    def run(weight_format: str) -> ModelRunner:
        said.clear()
        return ModelRunner(
            EngineConfig(model=str(path), weight_format=weight_format, kv_format="bf16", num_blocks=2, threads=1),
            said.append,
        )

    layers = run("w4a16")._decoder._weights.layers
    assert [layer.qkv.bits for layer in layers] == [0, 0], "v has no codes that its kernel could read"
    assert [layer.down.bits for layer in layers] == [0, 0]
    assert [layer.out.bits for layer in layers] == [4, 4]
    assert "4 in IQ4_NL and 4 in Q4_0 have no kernel, or lie beside some that have none, and become bf16" in said[0]
    run("bf16")
    assert said[0].startswith("The matrices of ")
    assert "(4 in IQ4_NL and 10 in Q4_0) and are converted to bf16; the weight format w4a16 keeps" in said[0]


def test_a_plain_file_is_converted_without_a_word(tmp_path: Path) -> None:
    path = model(tmp_path, {})
    said: list[str] = []
    ModelRunner(EngineConfig(model=str(path), weight_format="float32", kv_format="float32", num_blocks=2), said.append)
    assert said == []
    assert kept_format(path) is None
