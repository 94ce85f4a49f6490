"""A model is quantized, written, read again and run: the same weights in every layout, format and tier."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import Formats
from engine.errors import ConfigError, EngineError, ModelError
from engine.load.meta import read_meta
from engine.load.weights import WeightReader, open_model
from engine.quality.measure import measure
from engine.quality.serving import resolve_formats
from engine.quant.__main__ import main, quantize
from engine.quant.capture import ListeningKernels, Walk
from engine.quant.groups import Scheme
from engine.quant.layouts import LAYOUTS
from engine.quant.recipe import scaled_layer
from tests.engine.load.test_weights import to_gguf
from tests.engine.stepping import Stepper, make_runner
from tests.families import gemma3, make_family, qwen2, qwen3
from tests.tiny import make_tiny_model

PROMPT = [list(range(3, 60))]
TEXTS = ["The parcel was late and the customer asks for a refund.", "Order 1234567 was shipped to Berlin on 3 May."]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("calib") / "calib.jsonl"
    file.write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in TEXTS), "utf-8")
    return file


def run_quantize(model: Path, target: Path, calibration: Path | None = None, **changes: Any) -> dict[str, Any]:
    options = {"method": "rtn", "bits": 4, "group": 32, "layout": "compressed-tensors", "symmetric": True} | changes
    return quantize(str(model), target, calibration=calibration, **options)


@pytest.mark.parametrize(("config", "method"), [(qwen2, "awq"), (qwen3, "gptq"), (gemma3, "awq"), (gemma3, "gptq")])
def test_a_copy_of_any_family_in_eight_bits_is_the_model(
    tmp_path: Path, calibration: Path, config: Callable[..., Any], method: str
) -> None:
    """From a directory with AWQ's scales in norms, values and up projections; from a GGUF file with GPTQ."""
    model = make_family(tmp_path / "model", config(use_sliding_window=False, query_pre_attn_scalar=32))
    given = to_gguf(model, tmp_path / "m.gguf") if method == "gptq" else model
    exact = logits(given)
    run_quantize(given, tmp_path / "copy", calibration, method=method, bits=8)
    copy = logits(tmp_path / "copy")
    assert (copy - exact).std() < 0.03 * exact.std()
    as_stored = logits(tmp_path / "copy", weight_format="w8a16", kv_format="bf16")
    assert (as_stored - copy).std() < 0.03 * exact.std(), "the compiled kernels read it as it is"


def logits(path: Path, **formats: Any) -> torch.Tensor:
    return Stepper(make_runner(path, **formats), PROMPT).logits([57])[0]


@pytest.mark.parametrize("variant", [{}, {"tied": False}, {"attention_bias": True, "mlp_bias": True}], ids=str)
@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_eight_bits_are_the_model_and_four_near_it(
    tmp_path: Path, calibration: Path, method: str, variant: dict[str, bool]
) -> None:
    model = make_tiny_model(tmp_path / "model", **variant)
    exact = logits(model).log_softmax(-1)
    for bits, most in ((8, 0.01), (4, 0.8)):
        done = run_quantize(model, tmp_path / f"w{bits}", calibration, method=method, bits=bits)
        assert done["bytes_after"] < done["bytes_before"]
        found = logits(tmp_path / f"w{bits}").log_softmax(-1)
        assert float((exact.exp() * (exact - found)).sum(-1).mean()) < most


@pytest.mark.parametrize(("layout", "symmetric"), [("gptq", True), ("awq", False), ("compressed-tensors", False)])
def test_every_layout_runs_as_it_is_stored(tmp_path: Path, calibration: Path, layout: str, symmetric: bool) -> None:
    """In groups, and as floats: the same to bf16 steps and a head of 8 bits. `auto` takes the groups."""
    model = make_tiny_model(tmp_path / "model")
    target = tmp_path / "quantized"
    run_quantize(model, target, calibration, method="gptq", layout=layout, symmetric=symmetric)
    formats, _ = resolve_formats(str(target), "auto", "auto", lambda _: None, force=True)
    assert formats == Formats("w4a16", "bf16")
    grouped = logits(target, weight_format="w4a16", kv_format="bf16")
    assert torch.allclose(grouped, logits(target, weight_format="bf16", kv_format="bf16"), atol=0.12)
    assert torch.allclose(grouped, logits(target), atol=0.3)
    with pytest.raises(ConfigError, match="aren't stored as w8a16"):
        make_runner(target, weight_format="w8a16")
    with pytest.raises(ConfigError, match="aren't stored as w4a16"):
        make_runner(model, weight_format="w4a16")


def test_the_compiled_tier_runs_them_too(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=128, heads=4, kv_heads=2, mlp=192)
    for bits in (4, 8):
        target = tmp_path / f"w{bits}"
        run_quantize(model, target, bits=bits, group=64, symmetric=False)
        compiled, plain = make_runner(target, weight_format=f"w{bits}a16", kv_format="int8"), logits(target)
        assert compiled.kernels.is_fused
        assert torch.allclose(Stepper(compiled, PROMPT).logits([57])[0], plain, atol=0.4)


def test_gguf_models_become_directories_with_their_text_side(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "hf")
    file = to_gguf(directory, tmp_path / "model.gguf")
    for name, model in (("one", directory), ("other", file)):
        run_quantize(model, tmp_path / name)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert read_meta(tmp_path / "other").eos_ids == read_meta(file).eos_ids
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "other"))


def test_awq_scales_leave_the_model_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.quant.recipe.search_scale", lambda _weight, _moments, magnitude, _scheme: magnitude)
    path = make_tiny_model(tmp_path / "model", heads=8, attention_bias=True, mlp_bias=True)
    model, source = open_model(path)
    kernels = ListeningKernels(model)
    reader = WeightReader(model, source, kernels, torch.float32)
    embedding = reader.matrix(["embedding"], model.hidden, [model.vocab_size])
    layer = reader.layer(0)
    states = []
    for is_scaled in (False, True):
        walk = Walk(model, kernels, embedding, PROMPT)
        changed, scales = scaled_layer(layer, model, Scheme(bits=4, group=32), kernels, walk.listen(layer))
        walk.advance(changed if is_scaled else layer)
        states.append(walk.states())
    assert torch.allclose(*states, atol=1e-3)
    assert all(scale.max() > 1.1 * scale.min() for scale in scales), "there is something to see"


def test_large_models_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model")
    run_quantize(model, tmp_path / "one")
    monkeypatch.setattr("engine.quant.save.SHARD_BYTES", 20_000)
    run_quantize(model, tmp_path / "several")
    files = list((tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 2
    assert {file.stat().st_mode for file in files} == {(tmp_path / "several" / "config.json").stat().st_mode}
    assert torch.equal(logits(tmp_path / "one"), logits(tmp_path / "several"))


REFUSED = [
    ({"group": 48}, "groups of 32, 64 or 128"),
    ({"bits": 3}, "4 or 8 bits"),
    ({"group": 128}, "Groups of 128 don't divide the rows of 64 of model; use 32 or 64"),
    ({"method": "gptq"}, "--calib"),
    ({"layout": "gptq", "symmetric": False}, "zero points"),
    ({"layout": "awq", "bits": 8}, "4 bits"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_done_is_refused_and_nothing_is_left(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=says):
        run_quantize(model, tmp_path / "target", **changes)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_target_that_exists_and_broken_weights_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="exists already"):
        run_quantize(model, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        run_quantize(model, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert not list(tmp_path.glob(".*"))


def test_the_command_tells_progress_and_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calibration: Path
) -> None:
    model = make_tiny_model(tmp_path / "model")
    argv = [str(model), str(tmp_path / "target"), "--method", "awq", "--group", "32", "--save-as", "awq"]
    assert main([*argv, "--threads", "2", "--calib", str(calibration)]) == 0
    first, second, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first, second) == ({"layer": 1, "layers": 2}, {"layer": 2, "layers": 2})
    assert last["path"] == str(tmp_path / "target")
    assert last["symmetric"] is False, "AWQ has zero points unless told otherwise"
    assert main(argv) == 1
    assert "--calib" in json.loads(capsys.readouterr().out)["error"]


BROKEN = [
    (lambda t: t.pop("model.layers.0.self_attn.q_proj.{scale}"), "lacks the tensor .*q_proj.{scale}"),
    (lambda t: t.update({"model.layers.1.mlp.up_proj.{scale}": torch.zeros(1)}), "up_proj.{scale}"),
    (lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(1)}), "no place for: .*extra"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("damage", "says"), BROKEN, ids=["missing", "misshapen", "left over"])
def test_damaged_checkpoints_are_refused_by_the_tensor(tmp_path: Path, layout: str, damage: Any, says: str) -> None:
    target = a_checkpoint(tmp_path, layout)
    file = target / "model.safetensors"
    scale = "weight_scale" if layout == "compressed-tensors" else "scales"
    tensors = {key.replace(scale, "{scale}"): tensor for key, tensor in load_file(file).items()}
    damage(tensors)
    save_file({key.replace("{scale}", scale): tensor for key, tensor in tensors.items()}, file)
    for weight_format in ("w4a16", "bf16"):
        with pytest.raises(EngineError, match=says.format(scale=scale)):
            make_runner(target, weight_format=weight_format, kv_format="bf16")


def a_checkpoint(tmp_path: Path, layout: str) -> Path:
    model = make_tiny_model(tmp_path / "model")
    run_quantize(model, tmp_path / layout, layout=layout)
    shutil.rmtree(model)
    return tmp_path / layout


def test_public_gptq_files_with_empty_biases_and_column_orders_load(tmp_path: Path) -> None:
    target = a_checkpoint(tmp_path, "gptq")
    exact = logits(target)
    tensors = load_file(target / "model.safetensors")
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for name in [name for name in tensors if name.endswith(".g_idx") and "down_proj" not in name]:
        module = name.removesuffix(".g_idx")
        weight, _ = LAYOUTS["gptq"].read(
            lambda part, dtype, module=module: tensors[f"{module}.{part}"], lambda part: True, 4, 1
        )
        # the columns of each group stay together in its scale, and lie anywhere
        groups = (torch.arange(64) // 32)[order]
        moved = replace(weight, codes=weight.codes[:, order])
        tensors[f"{module}.qweight"] = LAYOUTS["gptq"].write(moved, torch.float16)["qweight"]
        tensors[name] = groups.to(torch.int32)
        tensors[f"{module}.bias"] = torch.zeros(len(weight.codes))
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (target / "config.json").write_text(json.dumps(config))
    formats, _ = resolve_formats(str(target), "auto", "auto", lambda _: None)
    assert formats.weights != "w4a16", "columns in an order of their own become floats"
    reader = WeightReader(*open_model(target), ListeningKernels(open_model(target)[0]), torch.float32)
    found = reader.layer(0).out.packed
    assert not torch.equal(logits(target), exact)
    back = order.argsort()
    run_quantize(make_tiny_model(tmp_path / "plain"), tmp_path / "same", layout="gptq")
    plain = WeightReader(*open_model(tmp_path / "same"), ListeningKernels(open_model(target)[0]), torch.float32)
    assert torch.equal(found[:, back], plain.layer(0).out.packed)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_codes_beat_rounding_on_the_default_model(tmp_path: Path, default_model: Path, method: str) -> None:
    """4 bits in groups of 64, against the float32 model on held-out text."""
    data = Path(__file__).parents[2] / "data" / "prompts.jsonl"
    kl = {}
    for name in ("rtn", method):
        run_quantize(default_model, tmp_path / name, data, method=name, group=64, tokens=4096)
        kl[name] = measure(str(tmp_path / name), "w4a16", against=str(default_model)).kl
    assert kl[method] < 0.9 * kl["rtn"], kl
