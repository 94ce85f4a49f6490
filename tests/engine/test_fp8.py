"""A model in fp8: near itself in float32, alike in every tier, from a plain checkpoint or one that is fp8 already.

Limits are wide: of a random model, roundings that fall the other way show in the logits.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, Formats
from engine.errors import ConfigError, ModelError
from engine.kernels import override
from engine.kernels.torch_tier import TorchKernels
from engine.load.quantization import stored_format
from engine.model.config import config_from_directory
from engine.quality.serving import resolve_formats
from engine.quant.__main__ import quantize
from engine.runner import ModelRunner
from tests.engine.load.test_quantized import scaled
from tests.engine.stepping import Stepper, make_runner
from tests.tiny import make_tiny_model

PROMPT = [list(range(3, 60))]
WIDE = {"hidden": 128, "heads": 4, "kv_heads": 2, "mlp": 192}


def logits(path: Path, **formats: str) -> torch.Tensor:
    return Stepper(make_runner(path, **formats), PROMPT).logits([20])[0]


def kl(exact: torch.Tensor, found: torch.Tensor) -> float:
    p, q = exact.log_softmax(-1), found.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("wide") / "model", **WIDE)


@pytest.fixture(scope="module")
def exact(wide_model: Path) -> torch.Tensor:
    return logits(wide_model)


@pytest.mark.parametrize(
    ("formats", "most"),
    [
        ({"weight_format": "fp8", "kv_format": "bf16"}, 0.08),
        ({"weight_format": "fp8", "kv_format": "fp8"}, 0.08),
        ({"kv_format": "fp8"}, 0.01),
        ({"kv_format": "int8"}, 0.001),
    ],
    ids=str,
)
def test_the_model_is_near_itself(wide_model: Path, exact: torch.Tensor, formats: dict[str, str], most: float) -> None:
    assert 0 < kl(exact, logits(wide_model, **formats)) < most


def test_tiers_agree(wide_model: Path) -> None:
    plain = TorchKernels(config_from_directory(wide_model), weight_format="fp8", kv_format="bf16", block_tokens=16)
    compiled = logits(wide_model, weight_format="fp8", kv_format="bf16")
    with override(plain):
        assert kl(logits(wide_model, weight_format="fp8", kv_format="bf16"), compiled) < 0.03


def test_what_it_costs_is_said(wide_model: Path) -> None:
    said: list[str] = []
    config = EngineConfig(model=str(wide_model), weight_format="fp8", kv_format="fp8", num_blocks=2, threads=1)
    ModelRunner(config, said.append)
    assert len(said) == 2
    assert "no less time" in said[0]
    assert "slower than int8" in said[1]


def test_weights_are_counted_as_they_are_held(wide_model: Path) -> None:
    runner = make_runner(wide_model, weight_format="fp8", kv_format="bf16", num_blocks=2)
    weights = runner._decoder._weights
    tensors = [weights.embedding, weights.head.packed]
    for layer in weights.layers:
        tensors += [part for m in (layer.qkv, layer.out, layer.gate_up, layer.down) for part in (m.packed, m.scale)]
    held = sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)
    assert held <= runner.memory.weight_bytes <= held + 5 * 128 * 2, "norms beside"


@pytest.mark.parametrize("biases", [False, True])
def test_a_quantized_copy_is_the_model_in_fp8(tmp_path: Path, biases: bool) -> None:
    model = make_tiny_model(tmp_path / "model", attention_bias=biases, mlp_bias=biases)
    done = quantize(
        str(model),
        tmp_path / "fp8",
        method="rtn",
        bits=8,
        group=64,
        layout="compressed-tensors",
        symmetric=True,
        is_float=True,
    )
    assert done["bits"] == "fp8"
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert (tensors[name].dtype, tensors[name + "_scale"].shape) == (torch.float8_e4m3fn, (64, 1))
    assert stored_format(tmp_path / "fp8") == "fp8"
    formats, _ = resolve_formats(str(tmp_path / "fp8"), "auto", "auto", lambda _: None, force=True)
    assert formats == Formats("fp8", "bf16")
    copy, online = (logits(path, weight_format="fp8", kv_format="float32") for path in (tmp_path / "fp8", model))
    assert kl(online, copy) < 0.05, "but for scales, which are bf16 in the file"
    assert kl(logits(tmp_path / "fp8"), copy) < 0.05, "and near its own weights with rows in full"


@pytest.mark.parametrize("changes", [{"method": "gptq"}, {"layout": "gptq"}, {"symmetric": False}], ids=str)
def test_what_fp8_has_not_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    options = {"method": "rtn", "layout": "compressed-tensors", "symmetric": True} | changes
    with pytest.raises(ConfigError, match="fp8 is rounded to nearest"):
        quantize("unread", tmp_path / "fp8", bits=8, group=64, is_float=True, **options)


@pytest.mark.parametrize("kind", ["fp8 matrix", "fp8 blocks", "fp8 static"])
def test_numbers_of_a_checkpoint_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    path = scaled(tmp_path / "scaled", kind)
    tensors = load_file(path / "model.safetensors")
    runner = make_runner(path, weight_format="fp8", kv_format="float32")
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    matrix = runner._decoder._weights.layers[1].qkv
    assert torch.equal(
        matrix.packed.view(torch.uint8), torch.cat([tensors[f"{name}.weight"] for name in names]).view(torch.uint8)
    )
    assert matrix.input_scale == (pytest.approx(0.02) if kind == "fp8 static" else None)
    assert kl(logits(path), logits(path, weight_format="fp8", kv_format="float32")) < 0.05


def test_matrices_that_were_left_out_stay_floats(tmp_path: Path) -> None:
    """As `ignore` and `modules_to_not_convert` say, which shows in what is stored."""
    path = scaled(tmp_path / "scaled", "fp8 matrix")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale")
    save_file(tensors, path / "model.safetensors")
    layers = make_runner(path, weight_format="fp8", kv_format="float32")._decoder._weights.layers
    kinds = [layer.down.packed.dtype for layer in layers]
    assert kinds == [torch.bfloat16, torch.float8_e4m3fn]


def test_a_number_that_is_none_and_a_bad_input_scale_are_refused(tmp_path: Path) -> None:
    path = scaled(tmp_path / "scaled", "fp8 static")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.weight"].view(torch.uint8)[3, 5] = 0x7F
    save_file(tensors, path / "model.safetensors")
    for weight_format in ("fp8", "bf16"):
        with pytest.raises(ModelError, match=f"tensor {name}.weight holds numbers that aren't finite"):
            make_runner(path, weight_format=weight_format)
    tensors[f"{name}.weight"].view(torch.uint8)[3, 5] = 0
    for bad in (torch.zeros(1), torch.ones(2), torch.full((1,), float("nan"))):
        save_file({**tensors, f"{name}.input_scale": bad}, path / "model.safetensors")
        with pytest.raises(ModelError, match=f"tensor {name}.input_scale is no single number above 0"):
            make_runner(path, weight_format="fp8")


def test_both_kinds_of_scales_at_once_are_refused(tmp_path: Path) -> None:
    path = scaled(tmp_path / "scaled", "fp8 matrix")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, f"{name}_scale_inv": torch.ones(1)}, path / "model.safetensors")
    with pytest.raises(ModelError, match="has both"):
        make_runner(path)


def test_a_shape_of_blocks_that_is_none_is_refused(tmp_path: Path) -> None:
    path = scaled(tmp_path / "scaled", "fp8 blocks")
    config = json.loads((path / "config.json").read_text())
    for bad in ([128], [0, 128], "wide", 128, [128, "x"]):
        config["quantization_config"]["weight_block_size"] = bad
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="scales of blocks of"):
            make_runner(path)
