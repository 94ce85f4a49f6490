"""What config.json says of quantization, and values of 8 bits with scales beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.load.quantization import Quantization, read_quantization, stored_format
from tests.engine.stepping import Stepper, make_runner
from tests.tiny import make_tiny_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def packed(**weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme}}


KNOWN = [
    (GPTQ, Quantization(layout="gptq", bits=4, zero_offset=1), "w4a16"),
    ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, Quantization(layout="gptq", bits=8), "w8a16"),
    ({**GPTQ, "desc_act": True}, Quantization(layout="gptq", bits=4, zero_offset=1, is_ordered=True), None),
    ({**GPTQ, "desc_act": True, "group_size": -1}, Quantization(layout="gptq", bits=4, zero_offset=1), "w4a16"),
    ({**GPTQ, "dynamic": {"-:.*head": {}}}, Quantization(layout="gptq", bits=4, zero_offset=1), "w4a16"),
    (AWQ, Quantization(layout="awq", bits=4), "w4a16"),
    ({"quant_method": "AWQ", "w_bit": 4, "version": "GEMM"}, Quantization(layout="awq", bits=4), "w4a16"),
    (packed(), Quantization(layout="compressed-tensors", bits=4), "w4a16"),
    (packed(actorder="weight"), Quantization(layout="compressed-tensors", bits=4), "w4a16"),
    (packed(actorder="group"), Quantization(layout="compressed-tensors", bits=4, is_ordered=True), None),
    ({**packed(num_bits=8), "format": "float-quantized"}, Quantization(layout="scaled", bits=8), None),
    ({"quant_method": "fp8"}, Quantization(layout="scaled", bits=8), None),
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
    ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "rules for single modules"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "'marlin'"),
    ({**AWQ, "version": "gemv"}, "'gemv'"),
    ({**packed(), "format": "marlin-24"}, "format marlin-24"),
    ({**packed(), "config_groups": [1]}, "format none"),
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
    """Every matrix of the layers as values of 8 bits, with one scale for it, for each row or for each block."""
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
        tensors[name.replace("weight", "input_scale")] = torch.ones(1)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    said = {**packed(num_bits=8), "format": "int-quantized"} if kind == "int8 rows" else {"quant_method": "fp8"}
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
