"""The memory plan: respects what it is told, takes a modest share of what is free, and says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.cache.pool import block_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.memory.drafting import draft_bytes
from engine.memory.formats import WeightFormat, kv_format, weight_format
from engine.memory.plan import KV_SHARE, available_bytes, plan_memory
from engine.memory.sizing import Workload, demand, weight_parts
from engine.memory.sources import read_shape
from engine.model.config import ModelConfig
from engine.quant.__main__ import quantize
from engine.runner import ModelRunner
from tests.engine.stepping import make_runner
from tests.tiny import make_tiny_model

MODEL = ModelConfig(
    vocab_size=49152,
    hidden=576,
    mlp=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_tokens=8192,
    norm_eps=1e-5,
    rope_theta=1e5,
    is_tied=True,
)
GIB = 1 << 30


def config(**changes: object) -> EngineConfig:
    return EngineConfig(model="m", **changes)


def test_parameters_are_counted_as_the_model_card_says() -> None:
    assert MODEL.num_parameters == 134_515_008
    assert block_bytes(MODEL, "bf16", 1) == 23_040


def test_numbers_that_were_given_are_kept() -> None:
    assert plan_memory(config(num_blocks=77), MODEL, available=GIB).num_blocks == 77
    plan = plan_memory(config(kv_bytes=GIB), MODEL, available=GIB)
    assert plan.num_blocks == GIB // (16 * 23_040)
    assert plan.kv_bytes <= GIB


@given(available=st.integers(GIB, 1 << 45), max_running=st.integers(1, 512), block_tokens=st.sampled_from([1, 16, 64]))
def test_kv_takes_a_share_but_never_more_than_can_be_used(available: int, max_running: int, block_tokens: int) -> None:
    plan = plan_memory(config(max_running=max_running, block_tokens=block_tokens), MODEL, available=available)
    assert plan.kv_bytes <= KV_SHARE * available
    assert plan.num_blocks * block_tokens <= max_running * MODEL.context_tokens
    assert plan.num_blocks >= 2
    assert plan.weight_bytes + plan.workspace_bytes + plan.kv_bytes <= available


def test_the_answer_is_explained_in_one_sentence() -> None:
    sentence = plan_memory(config(), MODEL, available=8 * GIB).sentence
    assert "25% of the" in sentence
    assert sentence.count(".") == 1
    assert "all that 2 sequences" in plan_memory(config(max_running=2), MODEL, available=80 * GIB).sentence


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"needs 311 MiB for weights .* only 100 MiB of memory is free"):
        plan_memory(config(), MODEL, available=100 << 20)
    few = "and 16 sequences at once in steps of 256 tokens"
    with pytest.raises(ModelError, match=rf"even int8 weights with int8 KV {few} need \d+ MiB\.$"):
        plan_memory(config(), MODEL, available=100 << 20)
    with pytest.raises(ModelError, match=rf"int8 weights with bf16 KV {few} would fit, with \d+ MiB\.$"):
        plan_memory(config(), MODEL, available=300 << 20)
    with pytest.raises(ModelError, match=r"int8 weights with bf16 KV would fit, with 382 MiB\.$"):
        plan_memory(config(), MODEL, available=450 << 20)
    with pytest.raises(ConfigError, match="kv_bytes is 1000"):
        plan_memory(config(kv_bytes=1000), MODEL, available=GIB)


def held_bytes(runner: ModelRunner) -> int:
    """Of all that was loaded, norms apart."""
    weights = runner._decoder._weights
    matrices = [weights.head]
    for layer in weights.layers:
        matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
    tensors = [weights.embedding]
    tensors += [part for m in matrices for part in (m.packed, m.scale, m.zero, m.bias) if part is not None]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def asked_bytes(model: Path, weights: WeightFormat) -> int:
    """What `models size` says."""
    workload = Workload(context_tokens=512, concurrency=1, weights=weights, kv=kv_format("bf16"))
    return demand(read_shape(model), workload).weights.total


@pytest.mark.parametrize("name", ["float32", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("heads", [2, 16], ids=["compiled", "torch"])
def test_weights_are_counted_as_the_engine_holds_them(tmp_path: Path, name: str, is_tied: bool, heads: int) -> None:
    model = make_tiny_model(
        tmp_path / "m", hidden=128, mlp=256, vocab_size=512, heads=heads, kv_heads=heads, tied=is_tied
    )
    runner = make_runner(model, weight_format=name, kv_format="bf16" if name != "float32" else name, num_blocks=2)
    assert runner.kernels.is_fused == (heads == 2 and name != "float32")
    norms = runner.memory.weight_bytes - held_bytes(runner)
    assert norms == (4 if name == "float32" else 2) * 128 * 5
    assert asked_bytes(model, weight_format(name)) == runner.memory.weight_bytes


def container(path: Path, limit: str) -> Path:
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text("700000\n")
    (path / "memory.stat").write_text("anon 1000\ninactive_file 200000\nactive_file 5\n")
    return path


def test_a_container_limit_counts_and_its_file_cache_does_not(tmp_path: Path) -> None:
    assert available_bytes(container(tmp_path, "1000000")) == 500_000
    assert available_bytes(container(tmp_path, "100000")) == 0
    assert available_bytes(container(tmp_path, "max")) > 1 << 20
    assert available_bytes(tmp_path / "none") > 1 << 20


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("heads", [2, 16], ids=["compiled", "torch"])
def test_weights_in_groups_are_counted_with_their_scales(
    tmp_path: Path, bits: int, group: int, symmetric: bool, heads: int
) -> None:
    model = make_tiny_model(tmp_path / "m", hidden=128, mlp=256, layers=1, heads=heads, kv_heads=heads)
    target = tmp_path / "small"
    quantize(str(model), target, method="rtn", bits=bits, group=group, layout="compressed-tensors", symmetric=symmetric)
    runner = make_runner(target, weight_format=f"w{bits}a16", kv_format="bf16", num_blocks=2)
    assert runner.memory.weight_bytes - held_bytes(runner) == 2 * 128 * 3, "norms beside"
    form = weight_format(f"int{bits}", group=group, has_zero_points=not symmetric)
    assert asked_bytes(target, form) == runner.memory.weight_bytes


def test_bytes_that_a_file_tells_come_before_those_of_its_format() -> None:
    told = plan_memory(config(weight_format="w4a16"), MODEL, available=4 * GIB, weight_bytes=GIB)
    assert told.weight_bytes == GIB
    with pytest.raises(ModelError, match="needs 4,096 MiB for weights"):
        plan_memory(config(weight_format="w4a16"), MODEL, available=4 * GIB, weight_bytes=4 * GIB)


def test_a_draft_takes_memory_beside_the_model_and_its_kv_what_is_left() -> None:
    draft = 200 << 20
    alone = plan_memory(config(), MODEL, available=GIB)
    both = plan_memory(config(), MODEL, available=GIB, draft_bytes=draft)
    assert both.draft_bytes == draft and both.weight_bytes == alone.weight_bytes
    assert alone.kv_bytes - both.kv_bytes == pytest.approx(KV_SHARE * draft, abs=16 * 23_040)
    assert "those of the draft 200 MiB" in both.sentence and "draft" not in alone.sentence


def test_a_machine_without_room_for_the_draft_says_so() -> None:
    alone = plan_memory(config(num_blocks=2), MODEL, available=0)
    needed = alone.weight_bytes + alone.workspace_bytes + (8 << 20)
    plan_memory(config(), MODEL, available=needed)
    with pytest.raises(ModelError, match=r"200 MiB for what drafts.*without a draft it would fit"):
        plan_memory(config(), MODEL, available=needed, draft_bytes=200 << 20)
    with pytest.raises(ModelError, match=r"would fit, with|even int8"):
        plan_memory(config(), MODEL, available=needed // 2, draft_bytes=200 << 20)


def test_a_runner_plans_for_the_draft_that_it_will_have(tmp_path: Path) -> None:
    sizes = {"hidden": 128, "mlp": 192, "heads": 4, "kv_heads": 2}
    model, small = make_tiny_model(tmp_path / "m", **sizes), make_tiny_model(tmp_path / "d", layers=1, **sizes)
    asked = config(num_blocks=8, threads=1, device="cpu")
    runner = ModelRunner(replace(asked, model=str(model), draft=str(small)))
    whole = weight_parts(read_shape(small), weight_format("bf16")).total
    assert runner.memory.draft_bytes == whole == draft_bytes(small, weight_format("bf16"))
    assert ModelRunner(replace(asked, model=str(model), draft=str(small), spec="ngram")).memory.draft_bytes == 0
    assert draft_bytes(small, weight_format("int8")) < whole == draft_bytes(small, weight_format("w4a16"))
    (small / "draft_vocab.json").write_text(json.dumps({"token_ids": list(range(100))}))
    assert whole - draft_bytes(small, weight_format("bf16")) == (384 - 100) * 128 * 2


def test_heads_are_counted_from_their_file(tmp_path: Path) -> None:
    save_file(
        {"ids": torch.zeros(7, dtype=torch.int32), "head": torch.zeros(7, 16), "0.down": torch.zeros(16, 5)},
        tmp_path / "heads.safetensors",
    )
    assert draft_bytes(tmp_path, weight_format("bf16")) == 2 * (7 * 16 + 16 * 5)
    assert draft_bytes(tmp_path, weight_format("float32")) == 4 * (7 * 16 + 16 * 5)
    (tmp_path / "heads.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="no usable safetensors file"):
        draft_bytes(tmp_path, weight_format("bf16"))
