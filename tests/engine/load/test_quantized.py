"""What config.json says of quantization, and values of 8 bits with scales beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.load.quantization import Quantization, read_quantization, stored_format
from engine.load.weights import open_model
from engine.quant.__main__ import quantize
from tests.engine.stepping import Stepper, make_runner
from tests.tiny import make_tiny_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def packed(**weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme}}


OLD_GPTQ = Quantization(layout="gptq", bits=4, zero_offset=1, group=128)
KNOWN = [
    (GPTQ, OLD_GPTQ, "w4a16"),
    (
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        Quantization(layout="gptq", bits=8, group=128),
        "w8a16",
    ),
    ({**GPTQ, "sym": False, "group_size": 32}, replace(OLD_GPTQ, has_zeros=True, group=32), "w4a16"),
    ({**GPTQ, "desc_act": True}, replace(OLD_GPTQ, is_ordered=True), None),
    ({**GPTQ, "desc_act": True, "group_size": -1}, replace(OLD_GPTQ, group=None), "w4a16"),
    ({**GPTQ, "dynamic": {"-:.*head": {}}}, OLD_GPTQ, "w4a16"),
    (AWQ, Quantization(layout="awq", bits=4, group=128, has_zeros=True), "w4a16"),
    (
        {"quant_method": "AWQ", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": False},
        Quantization(layout="awq", bits=4, group=64),
        "w4a16",
    ),
    (packed(), Quantization(layout="compressed-tensors", bits=4), "w4a16"),
    (packed(actorder="weight"), Quantization(layout="compressed-tensors", bits=4), "w4a16"),
    (packed(actorder="group"), Quantization(layout="compressed-tensors", bits=4, is_ordered=True), None),
    (
        packed(group_size=64, symmetric=False),
        Quantization(layout="compressed-tensors", bits=4, group=64, has_zeros=True),
        "w4a16",
    ),
    (
        {**packed(actorder="static"), "transform_config": {}, "sparsity_config": {}, "kv_cache_scheme": None},
        Quantization(layout="compressed-tensors", bits=4),
        "w4a16",
    ),
    (
        {**packed(num_bits=8), "format": "int-quantized"},
        Quantization(layout="scaled", bits=8),
        None,
    ),
    (
        {**packed(num_bits=8, type="float", block_structure="64x128"), "format": "float-quantized"},
        Quantization(layout="scaled", bits=8, is_float=True, block=(64, 128)),
        "fp8",
    ),
    ({"quant_method": "fp8"}, Quantization(layout="scaled", bits=8, is_float=True), "fp8"),
    (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 64]},
        Quantization(layout="scaled", bits=8, is_float=True, is_static=True, block=(128, 64)),
        "fp8",
    ),
]


@pytest.mark.parametrize(("said", "found", "weight_format"), KNOWN, ids=lambda value: str(value)[:40])
def test_layouts_are_told_apart(said: dict[str, Any], found: Quantization, weight_format: str | None) -> None:
    assert read_quantization({"quantization_config": said}, Path("m")) == found
    assert found.weight_format == weight_format


UNKNOWN = [
    (7, "is no object"),
    ({}, "is quantized by ''"),
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes'; supported are gptq"),
    ({**GPTQ, "bits": 3}, "weights of 3 bits"),
    ({**GPTQ, "bits": True}, "weights of True bits"),
    ({**GPTQ, "group_size": 0}, "groups of '0' columns"),
    ({**AWQ, "group_size": "wide"}, "groups of 'wide' columns"),
    (packed(group_size=-7), "groups of '-7' columns"),
    ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "rules for single modules"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
    ({**AWQ, "version": "gemv"}, "'gemv'"),
    ({**packed(), "format": "marlin-24"}, "format marlin-24"),
    ({**packed(), "config_groups": [1]}, "format none"),
    ({**packed(), "transform_config": {"config_groups": {"R4": {}}}}, "with a transform_config"),
    ({**packed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "with a sparsity_config"),
    (packed(num_bits=5), "weights of 5 bits"),
    (packed(num_bits=[4]), "weights of \\[4\\] bits"),
]


@pytest.mark.parametrize(("said", "says"), UNKNOWN, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_told(said: object, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_quantization({"quantization_config": said}, Path("m"))


def test_plain_models_have_no_stored_format(tiny_model: Path) -> None:
    assert stored_format(tiny_model) is None
    assert stored_format(tiny_model / "model.safetensors") is None


def scaled(path: Path, kind: str) -> Path:
    """Every matrix of the layers as values of 8 bits, with one scale for it, for each row or for each block; "static"
    ones are meant for inputs of a scale that is given."""
    directory = make_tiny_model(path)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors[name]
        scale = weight.abs().amax(1, keepdim=True) / 127
        if kind != "int8 rows":
            scale = weight.abs().amax().reshape(1) / 448
        stored = scale
        if kind == "fp8 blocks":
            rows, columns = weight.shape
            stored = scale.expand(-(-rows // 128), -(-columns // 128)).contiguous()
        values = weight / (scale if scale.dim() == 2 else scale.item())
        tensors[name] = values.round().to(torch.int8) if kind == "int8 rows" else values.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv" if kind == "fp8 blocks" else f"{name}_scale"] = stored
        tensors[name.replace("weight", "input_scale")] = torch.full((1,), 0.02)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    said = {**packed(num_bits=8), "format": "int-quantized"} if kind == "int8 rows" else {"quant_method": "fp8"}
    if kind == "fp8 static":
        said["activation_scheme"] = "static"
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return directory


def logits(path: Path) -> torch.Tensor:
    return Stepper(make_runner(path), [list(range(3, 60))]).logits([57])[0]


@pytest.mark.parametrize(("kind", "most"), [("int8 rows", 2e-3), ("fp8 matrix", 0.05), ("fp8 blocks", 0.05)])
def test_values_of_eight_bits_become_floats(tmp_path: Path, kind: str, most: float) -> None:
    exact = logits(make_tiny_model(tmp_path / "plain")).log_softmax(-1)
    found = logits(scaled(tmp_path / "scaled", kind)).log_softmax(-1)
    assert 0 < float((exact.exp() * (exact - found)).sum(-1).mean()) < most


def test_scales_that_do_not_fit_are_told(tmp_path: Path) -> None:
    directory = scaled(tmp_path / "scaled", "int8 rows")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight_scale"
    for scale, says in ((torch.ones(7, 3), "no scales of"), (torch.zeros(64, 1), "zero or not a number")):
        save_file({**tensors, name: scale}, directory / "model.safetensors")
        with pytest.raises(ModelError, match=f"{name}.*{says}"):
            make_runner(directory)


@pytest.mark.parametrize("changes", ["zeros", "groups", "order"])
def test_integers_with_zeros_in_groups_or_in_an_order_become_floats(tmp_path: Path, changes: str) -> None:
    """int-quantized and naive-quantized files may have all of these."""
    directory = scaled(tmp_path / "scaled", "int8 rows")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    values, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    groups = scale.repeat(1, 2) * torch.tensor([1.0, 0.5])
    expected = values.float() * scale
    if changes == "zeros":
        tensors[f"{name}.weight_zero_point"] = torch.full((64, 1), 3, dtype=torch.int8)
        expected = (values.float() - 3) * scale
    if changes == "groups":
        tensors[f"{name}.weight_scale"] = groups
        expected = values.float() * groups.repeat_interleave(64, 1)
    if changes == "order":
        order = torch.randperm(128, generator=torch.Generator().manual_seed(0)) % 2
        tensors |= {f"{name}.weight_scale": groups, f"{name}.weight_g_idx": order.to(torch.int32)}
        expected = values.float() * groups[:, order]
    save_file(tensors, directory / "model.safetensors")
    found = open_model(directory)[1].load("0.down.weight")
    assert torch.equal(found, expected)
    if changes == "order":
        save_file(
            {**tensors, f"{name}.weight_g_idx": torch.full((128,), 2, dtype=torch.int32)},
            directory / "model.safetensors",
        )
        with pytest.raises(ModelError, match=f"{name}.weight_g_idx doesn't give each of 128 columns one of 2 groups"):
            make_runner(directory)
    if changes == "zeros":
        save_file(
            {**tensors, f"{name}.weight_zero_point": torch.zeros(5, 1, dtype=torch.int8)},
            directory / "model.safetensors",
        )
        with pytest.raises(ModelError, match=f"{name}.weight_zero_point has the shape"):
            make_runner(directory)


def test_two_kinds_in_one_checkpoint(tmp_path: Path) -> None:
    """`mixed-precision`: integers in groups beside fp8 numbers, each matrix by what is stored of it."""
    plain = make_tiny_model(tmp_path / "plain")
    options = {"method": "rtn", "group": 32, "layout": "compressed-tensors", "symmetric": True}
    quantize(str(plain), tmp_path / "int4", bits=4, **options)
    quantize(str(plain), tmp_path / "fp8", bits=8, is_float=True, **options)
    tensors, other = (load_file(tmp_path / name / "model.safetensors") for name in ("int4", "fp8"))
    config, its = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("int4", "fp8"))
    for name in [name for name in tensors if "down_proj" in name]:
        del tensors[name]
    tensors |= {name: tensor for name, tensor in other.items() if "down_proj" in name}
    save_file(tensors, tmp_path / "int4" / "model.safetensors")
    said = config["quantization_config"]
    groups = [said["config_groups"]["group_0"], its["quantization_config"]["config_groups"]["group_0"]]
    said |= {
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {**groups[0], "format": "pack-quantized"},
            "group_1": {**groups[1], "format": "float-quantized"},
        },
    }
    (tmp_path / "int4" / "config.json").write_text(json.dumps(config))
    assert stored_format(tmp_path / "int4") == "w4a16"
    layer = make_runner(tmp_path / "int4", weight_format="w4a16", kv_format="bf16")._decoder._weights.layers[0]
    assert (layer.gate_up.bits, layer.down.bits) == (4, 0)
    expected = load_file(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    dense = (expected[name].float() * expected[f"{name}_scale"].float()).bfloat16()
    assert torch.equal(layer.down.packed, dense)
    fp8_layer = make_runner(tmp_path / "int4", weight_format="fp8", kv_format="bf16")._decoder._weights.layers[0]
    assert (fp8_layer.gate_up.packed.dtype, fp8_layer.down.packed.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
